"""The keys of rows: settings and their names in other tools, keys that are not applied, and harmless keys.

A key that is in none of these tables is named as not known. `docs/generate.md` lists them by
`scripts/make/row_keys.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKey:
    """What a row may set, and the names that tools have for it."""

    means: str
    also: tuple[str, ...] = ()  # other names than its own

    def names(self, name: str) -> tuple[str, ...]:
        """Return all names of a setting."""
        return (name, *self.also)


SETTINGS: dict[str, RowKey] = {
    "max_new_tokens": RowKey(
        also=("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict"),
        means="new tokens at most; -1: all that the context holds",
    ),
    "min_new_tokens": RowKey(also=("min_tokens",), means="new tokens before which no stop token is drawn"),
    "temperature": RowKey(means="0 is greedy"),
    "do_sample": RowKey(means="false is greedy, whatever the temperature"),
    "top_p": RowKey(means="1 keeps all"),
    "top_k": RowKey(means="0 and -1 keep all"),
    "min_p": RowKey(means="0 keeps all"),
    "repetition_penalty": RowKey(also=("repeat_penalty",), means="1 is none"),
    "presence_penalty": RowKey(means="0 is none"),
    "frequency_penalty": RowKey(means="0 is none"),
    "logit_bias": RowKey(means='`{"42": -100, " word": 5}`'),
    "ignore_eos": RowKey(also=("ban_eos_token",), means="true: the model's stop tokens are never drawn"),
    "stop": RowKey(
        also=("stop_strings", "stop_sequences", "stopping_strings"),
        means="a text, or a list of texts, that end an answer and are left out; an empty text is none",
    ),
    "stop_token_ids": RowKey(means="ids of tokens that end an answer, beside the model's own"),
    "skip_special_tokens": RowKey(means="false keeps the special tokens of an answer in its text"),
    "suppress_tokens": RowKey(means="ids of tokens that are never drawn"),
    "seed": RowKey(means="-1: the run's"),
    "logprobs": RowKey(also=("top_logprobs", "n_probs"), means="of each token, and of this many likely ones"),
    "prompt_logprobs": RowKey(means="of each of the prompt's tokens, and of this many likely ones"),
    "response_format": RowKey(
        also=("json_schema", "guided_json"), means="OpenAI's form, or a JSON schema, which the text fits"
    ),
    "grammar": RowKey(
        also=("guided_grammar", "grammar_string", "guided_regex", "guided_choice"),
        means="in Lark's form or GBNF, a regular expression, or a list of texts, which the text matches",
    ),
    "system": RowKey(also=("system_prompt",), means="the system prompt"),
    "template_args": RowKey(
        also=("chat_template_kwargs", "documents", "reasoning_effort", "tools"),
        means="what the chat template reads beside messages: an object, or each by its own name",
    ),
    "continue_final_message": RowKey(means="false: an assistant's message at the end is whole, and no answer begun"),
    "tool_choice": RowKey(means="whether one of the tools has to be called, as OpenAI has it"),
    "reasoning_budget": RowKey(
        also=("thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget_tokens"),
        means="tokens of thought before an answer at most; 0: none, -1: any number",
    ),
    "parallel_tool_calls": RowKey(means="false: of an answer's calls the first counts"),
    "adapter": RowKey(
        also=("adapters",),
        means='of the run\'s adapters: a name, a list of names, or `{"name": scale}`; null, and what is empty: none',
    ),
}
SETTING_OF = {name: setting for setting, about in SETTINGS.items() for name in about.names(setting)}
NULL_SAYS_SOMETHING = frozenset(SETTINGS["adapter"].names("adapter"))

# Objects in a row, beside an OpenAI batch's body, whose settings are the row's own; one without a known key is data.
OPENED = (
    "options", "parameters", "sampling_params", "sampling_parameters", "extra_body", "generation_config",
    "generation_kwargs", "gen_kwargs",
)  # fmt: skip
# vLLM's structured_outputs: its keys -> those that mean the same in a row
STRUCTURED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}

# Keys of other tools that change the text there, and not here -> values that ask for nothing, beside null and what is
# empty
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "beam_size", "best_of", "cfg_scale", "encoder_repetition_penalty", "guidance_scale",
        "length_penalty", "n", "num_beam_groups", "num_beams", "num_return_sequences", "tfs", "tfs_z",
        "typical", "typical_p",
    ), (0, 1)),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens"), (True,)),
    **dict.fromkeys((
        "repeat_last_n", "repetition_penalty_range", "top_n_sigma",
        "truncate_prompt_tokens",
    ), (0, -1)),
    **dict.fromkeys(("enable_thinking", "eos_token_id", "think", "thinking"), ()),
    **dict.fromkeys((
        "allowed_token_ids", "allowed_tokens", "assistant_prefix", "audio", "bad_words", "bad_words_ids",
        "begin_suppress_tokens", "chat_template", "constraints",
        "custom_stopping_strings", "custom_token_bans", "diversity_penalty", "dry_multiplier",
        "dynamic_temperature", "dynatemp_range", "early_stopping", "ebnf", "echo",
        "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff",
        "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "format",
        "function_call", "functions", "include_stop_str_in_output", "logits_processors",
        "lora_request", "max_length", "min_length", "mirostat",
        "mirostat_mode", "mm_processor_kwargs", "modalities", "model", "model_id", "negative_prompt",
        "no_repeat_ngram_size", "num_ctx", "penalize_nl", "penalty_alpha",
        "prediction", "prefix", "prompt_embeds", "raw", "regex", "return_full_text",
        "sampler_priority", "samplers", "sequence_bias", "smoothing_factor",
        "structural_tag", "structured_outputs", "suffix", "temperature_last", "template",
        "top_a", "truncate", "use_beam_search", "verbosity", "watermark",
        "web_search_options", "whitelist", "xtc_probability",
    ), (False, 0)),
}  # fmt: skip

# Keys that change no text: of transport and machines, what needs another key that is named, and what sets of questions
# tell of their rows
HARMLESS = frozenset({
    "backend", "cache_prompt", "category", "created", "created_at", "custom_id", "endpoint", "f16_kv",
    "guided_decoding_backend", "id", "id_slot", "keep_alive", "low_vram", "main_gpu", "metadata", "method", "name",
    "num_batch", "num_gpu", "num_thread", "numa", "output_kind", "pad_token_id", "priority", "prompt_cache_key",
    "question_id", "reference", "request_id", "return_dict_in_generate", "safety_identifier", "service_tier",
    "slot_id", "source", "store", "stream", "stream_interval", "stream_options", "timeout", "transformers_version",
    "url", "use_cache", "use_mlock", "use_mmap", "user",
    "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynamic_temperature_exponent", "dynamic_temperature_high", "dynamic_temperature_low", "dynatemp_exponent",
    "mirostat_eta", "mirostat_tau", "n_keep", "num_keep", "smoothing_curve", "xtc_threshold",
    "answer", "answers", "answerKey", "canonical_solution", "choices", "context_id", "dataset", "difficulty",
    "domain", "entry_point", "explanation", "idx", "index", "label", "language", "level", "references", "score",
    "solution", "source_id", "split", "subject", "subset", "tags", "target", "task", "task_id", "test", "test_list",
    "timestamp", "title", "topic", "type", "uuid",
})  # fmt: skip


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a key that is not applied has a value that changes nothing."""
    return value in ("", [], {}) or value in NOT_APPLIED[name]


def opened(row: Mapping[str, Any], location: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield where each key of a row stands, its name and its value: those of opened objects too, and of null ones those
    alone that null says something of.
    """
    for name, value in row.items():
        if value is None and name not in NULL_SAYS_SOMETHING:
            continue
        if isinstance(value, dict) and name == "structured_outputs":
            for key, part in value.items():
                yield f"{location}{name}.{key}", STRUCTURED.get(key, f"{name}.{key}"), part
        elif isinstance(value, dict) and name == "body" and not location:
            yield from opened(value)
        elif isinstance(value, dict) and name in OPENED and _has_settings(value):
            yield from opened(value, f"{location}{name}.")
        else:
            yield f"{location}{name}", name, value


def _has_settings(value: Mapping[str, Any]) -> bool:
    return any(name in SETTING_OF or name in NOT_APPLIED or name in OPENED for name in value)


def sorted_out(row: Mapping[str, Any], known: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys of a row that are not applied, and those that are not known; `known` ones are the row's form."""
    not_applied, unknown = set(), set()
    for location, name, value in opened(row):
        if name in SETTING_OF or name in HARMLESS or name in known:
            continue
        if name not in NOT_APPLIED:
            unknown.add(location)
        elif not is_neutral(name, value):
            not_applied.add(location)
    return frozenset(not_applied), frozenset(unknown)
