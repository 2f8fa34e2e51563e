"""What becomes of each field of a request's body: one record a field and protocol, which the check and the docs read.

A field that the client relies on is done, or refused by name. One that cannot change the answer, or that only offers
something, is taken without effect, and named. A value that asks for nothing is taken wherever it stands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Use: TypeAlias = Literal["done", "unused", "refused"]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = PROTOCOLS = ("chat completions", "completions", "responses", "messages")
_OPENAI = (CHAT, COMPLETIONS, RESPONSES)
_DRAWN = (CHAT, COMPLETIONS)  # protocols with the fields of vLLM and llama.cpp


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """What becomes of one field; null and what is empty always count as left out, but for an empty value that says
    something.
    """

    name: str
    use: Use
    means: str  # for the docs: what is done, or why nothing is
    protocols: Sequence[str]
    nothing: tuple[Any, ...] = ()  # more values that ask for nothing
    other_name_of: str | None = None  # the field that is read in its place
    is_empty_value_read: bool = False


def _fields(
    use: Use, names: str, means: str, protocols: Sequence[str] = _DRAWN, *, nothing: tuple[Any, ...] = ()
) -> Iterator[RequestField]:
    """Yield a record a name; `a=b` is another name of `b`, and `a!` has an empty value that says something."""
    for written in names.split():
        name, _, other = written.partition("=")
        yield RequestField(
            name=name.rstrip("!"), use=use, means=f"another name of `{other}`" if other else means,
            protocols=protocols, nothing=nothing, other_name_of=other or None, is_empty_value_read=name.endswith("!"),
        )  # fmt: skip


FIELDS: tuple[RequestField, ...] = (
    # What is asked
    *_fields("done", "model",
             "the base, or BASE:ADAPTER where the server was given adapters; else any name will do", PROTOCOLS),
    *_fields("done", "messages!", "the conversation: texts, calls of tools and their results", (CHAT, MESSAGES)),
    *_fields("done", "prompt!", "a text or token ids, or several of them", (COMPLETIONS,)),
    *_fields("done", "input! instructions", "the conversation, of text, thoughts, calls and their results",
             (RESPONSES,)),
    *_fields("done", "system", "the system prompt", (MESSAGES,)),
    *_fields("done", "continue_final_message", "whether the assistant's last message goes on; it does by default",
             (CHAT,)),
    *_fields("done", "add_generation_prompt", "the contrary of `continue_final_message`", (CHAT,)),
    *_fields("done", "stream", "events as the text is written", PROTOCOLS),
    *_fields("done", "stream_options", "`include_usage`, `continuous_usage_stats`, and the page's `include_draft`",
             _DRAWN),
    *_fields("done", "stream_options", "nothing is encrypted on the way", (RESPONSES,)),
    *_fields("done", "n", "texts of each prompt", _DRAWN),
    *_fields("done", "max_tokens n_predict=max_tokens max_new_tokens=max_tokens", "-1: all that the context holds"),
    *_fields("done", "max_completion_tokens", "counts above `max_tokens`", (CHAT,)),
    *_fields("done", "max_output_tokens", "-1: all that the context holds", (RESPONSES,)),
    *_fields("done", "max_tokens", "-1: all that the context holds", (MESSAGES,)),
    *_fields("done", "min_tokens", "before which no text ends"),
    # How it is drawn
    *_fields("done", "temperature", "left out: as the server's start says", PROTOCOLS),
    *_fields("done", "top_p", "the model's own where it is left out", PROTOCOLS),
    *_fields("done", "top_k", "the model's own where it is left out; 0 and -1 keep all", PROTOCOLS),
    *_fields("done", "min_p", "the model's own where it is left out; 0 keeps all", _OPENAI),
    *_fields("done", "presence_penalty frequency_penalty repetition_penalty repeat_penalty=repetition_penalty",
             "as vLLM has them"),
    *_fields("done", "logit_bias", "by token id, or by a text that is one token"),
    *_fields("done", "seed", "the text is the one of `edgespec generate`; -1 is none", PROTOCOLS, nothing=(-1,)),
    *_fields("done", "ignore_eos ban_eos_token=ignore_eos", "the model's stop tokens are never drawn"),
    *_fields("done", "stop stopping_strings=stop", "an empty string is none"),
    *_fields("done", "stop_sequences", "an empty string is none", (MESSAGES,)),
    *_fields("done", "stop_token_ids", "beside the model's own"),
    *_fields("done", "skip_special_tokens", "false keeps them in the text", (COMPLETIONS,)),
    *_fields("refused", "skip_special_tokens", "answers are told apart by them, and have none", (CHAT,),
             nothing=(True,)),
    # The form of the text
    *_fields("done", "response_format", "text, json_object or json_schema"),
    *_fields("done", "json_schema! guided_json!=json_schema", "a schema that the text fits; `{}` is any JSON"),
    *_fields("done", "grammar guided_grammar=grammar grammar_string=grammar ebnf=grammar", "Lark's form or GBNF"),
    *_fields("done", "guided_regex regex=guided_regex", "a regular expression that the whole text matches"),
    *_fields("done", "guided_choice", "a list of texts, of which the answer is one"),
    *_fields("done", "structured_outputs", "`json`, `json_object`, `regex`, `choice` or `grammar`"),
    *_fields("done", "text", "the format and its schema; a verbosity is a wish that nothing reads", (RESPONSES,)),
    *_fields("done", "output_config output_format", "a schema; an effort for templates that read it", (MESSAGES,)),
    *_fields("refused", "guided_whitespace_pattern structural_tag", "no grammar here has it"),
    # Log-probabilities
    *_fields("done", "logprobs", "of each new token", (CHAT,)),
    *_fields("done", "top_logprobs", "up to 20 of each new token", (CHAT,)),
    *_fields("done", "logprobs", "up to 20 of each new token; false is none", (COMPLETIONS,), nothing=(False,)),
    *_fields("done", "echo", "the prompt stands before the text, in `logprobs` too; `max_tokens` may then be 0",
             (COMPLETIONS,)),
    *_fields("refused", "top_logprobs", "responses have none here", (RESPONSES,), nothing=(0,)),
    *_fields("refused", "prompt_logprobs", "answers have none", nothing=(False,)),
    *_fields("refused", "logprob_token_ids return_token_ids return_tokens_as_token_ids n_probs "
             "post_sampling_probs return_hidden_states",
             "answers have none", nothing=(False, 0)),
    # Tools and thoughts
    *_fields("done", "tools", "functions; where the template reads none, or for other kinds, they are only offered",
             (CHAT, RESPONSES, MESSAGES)),
    *_fields("done", "tool_choice", "a choice that forces a call is kept by a grammar, or refused",
             (CHAT, RESPONSES, MESSAGES)),
    *_fields("done", "parallel_tool_calls", "false: an answer ends with its first call", (CHAT, RESPONSES)),
    *_fields("done", "chat_template_kwargs reasoning_effort enable_thinking thinking reasoning think=enable_thinking",
             "for templates that read it", (CHAT,)),
    *_fields("done", "reasoning", "an effort, for templates that read it, and `max_tokens` of thought", (RESPONSES,)),
    *_fields("done", "thinking", "for templates that read `enable_thinking`", (MESSAGES,)),
    *_fields("done", "include", "what never comes here is taken; log-probabilities are refused", (RESPONSES,)),
    *_fields("done", "truncation", "`auto` lets a server drop turns, which is never done", (RESPONSES,)),
    *_fields("done", "context_management", "a change that keeps everything", (MESSAGES,)),
    *_fields("done", "modalities", "text alone", (CHAT,)),
    *_fields("unused", "include_reasoning separate_reasoning stream_reasoning", "thoughts are sent apart", _DRAWN,
             nothing=(True,)),
    *_fields("done", "reasoning_budget thinking_budget=reasoning_budget thinking_token_budget=reasoning_budget "
             "thinking_budget_tokens=reasoning_budget reasoning_budget_tokens=reasoning_budget",
             "tokens of thought at most, where the model has thoughts; 0 is none, -1 any number", (CHAT,)),
    *_fields("unused", "thinking_token_budget thinking_budget reasoning_budget thinking_budget_tokens "
             "reasoning_budget_tokens", "a text without a template has no thoughts", (COMPLETIONS,), nothing=(-1,)),
    *_fields("unused", "preserve_thinking verbosity", "a wish that nothing here reads", nothing=(-1,)),
    *_fields("refused", "reasoning_format", "thoughts are sent apart", nothing=("auto", "deepseek")),
    *_fields("unused", "functions", "an older form of `tools`, which is not called", (CHAT,)),
    *_fields("refused", "function_call", "an older form of `tool_choice`", (CHAT,), nothing=("auto", "none")),
    # What only describes a request, or offers something
    *_fields("unused", "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
             "prompt_cache_options client_metadata session_id request_id trace",
             "it describes the request", PROTOCOLS, nothing=("auto", "default")),
    *_fields("unused", "store", "nothing is stored", PROTOCOLS, nothing=(False,)),
    *_fields("unused", "cache_control speed inference_geo diagnostics user_profile_id workspace_id betas "
             "anthropic_beta anthropic_version billing_policy",
             "it describes the request", (MESSAGES,)),
    *_fields("unused", "prediction", "drafts are this server's own affair", (CHAT,)),
    *_fields("unused", "max_tool_calls context_management access_programs",
             "of tools and turns that this server never runs or drops", (RESPONSES,)),
    *_fields("done", "cache_prompt", "false: the prompt is read anew, as if nothing were cached"),
    *_fields("unused", "cache_salt id_slot slot_id n_keep num_keep keep_alive ttl num_ctx num_batch "
             "num_gpu main_gpu num_thread low_vram use_mmap use_mlock f16_kv numa truncation_length "
             "kv_transfer_params ec_transfer_params priority rid session_params speculative_ngram",
             "the server's memory and machines are set when it starts",
             nothing=(False, True, 0, -1)),
    *_fields("unused", "timings_per_token return_progress stream_interval usage response_fields return_tokens",
             "`usage` and `timings` come in any case", nothing=(False,)),
    *_fields("unused", "provider models route transforms", "there is one model, on this machine", (CHAT, COMPLETIONS)),
    *_fields("unused", "guided_decoding_backend spaces_between_special_tokens truncation_side "
             "mm_processor_kwargs media_io_kwargs use_audio_in_video vl_high_resolution_images no_stop_trim "
             "add_bos_token api_type api_server",
             "it changes no answer here", nothing=(True, False)),
    *_fields("unused", "samplers sampler_priority sampler_order sampler_seq temperature_last",
             "samplers have one order here, as in vLLM", nothing=(False,)),
    *_fields("unused", "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n "
             "dry_sequence_breakers xtc_threshold smoothing_curve dynatemp_exponent dynamic_temperature_exponent "
             "dynatemp_low dynatemp_high min_temp max_temp rep_pen_slope min_keep",
             "it says how another setting works, which is refused"),
    # What the client relies on, and is not done
    *_fields("refused", "suffix", "nothing is written towards what follows", (COMPLETIONS,)),
    *_fields("refused", "best_of num_beams num_beam_groups use_beam_search length_penalty early_stopping "
             "diversity_penalty beam_width",
             "no beams are searched", nothing=(False, 0, 1)),
    *_fields("refused", "typical_p typical tfs tfs_z cfg_scale guidance_scale encoder_repetition_penalty",
             "a sampler that is not here", nothing=(0, 1)),
    *_fields("refused", "mirostat mirostat_mode top_a top_n_sigma nsigma dynatemp_range dynamic_temperature "
             "smoothing_factor dry_multiplier xtc_probability epsilon_cutoff eta_cutoff no_repeat_ngram_size "
             "penalty_alpha skew repetition_decay watermark watermarking",
             "a sampler that is not here", nothing=(False, 0, -1)),
    *_fields("refused", "repeat_last_n repetition_penalty_range rep_pen_range", "a penalty looks at the whole text",
             nothing=(0, -1)),
    *_fields("refused", "negative_prompt bad_words banned_strings custom_token_bans allowed_token_ids "
             "allowed_tokens logits_processors custom_logit_processor custom_params repetition_detection "
             "stop_regex vllm_xargs",
             "it would change the text"),
    *_fields("refused", "include_stop_str_in_output", "strings that stop are no part of the text",
             nothing=(False,)),
    *_fields("refused", "truncate_prompt_tokens", "a prompt is read whole, or refused", nothing=(0, -1)),
    *_fields("refused", "prompt_embeds", "only texts and token ids are read", (COMPLETIONS,)),
    *_fields("refused", "add_special_tokens", "the model's own way", (COMPLETIONS,), nothing=(True,)),
    *_fields("refused", "add_special_tokens echo", "the chat template has the last word", (CHAT,), nothing=(False,)),
    *_fields("refused", "chat_template", "the server has one (`chat_template` when it starts)", (CHAT,)),
    *_fields("refused", "documents", "put them into the messages", (CHAT,)),
    *_fields("done", "lora!", "how much each adapter counts, as llama.cpp has it: `[{\"id\": 0, \"scale\": 0.5}]`; "
             "others count nothing", PROTOCOLS),
    *_fields("refused", "lora_request lora_path lora_id adapter adapter_id adapters",
             "an adapter is chosen by the name of the model, BASE:ADAPTER", PROTOCOLS),
    *_fields("refused", "audio image images", "only text is written", (CHAT, RESPONSES)),
    *_fields("refused", "web_search_options plugins moderation", "nothing is run or searched here",
             (CHAT, RESPONSES)),
    *_fields("refused", "background background_options", "an answer comes while the client waits", (RESPONSES,),
             nothing=(False,)),
    *_fields("refused", "previous_response_id conversation",
             "nothing is kept under a name: send the whole conversation as `input`", (RESPONSES,)),
    *_fields("refused", "prompt", "no prompts are stored here", (RESPONSES,)),
    *_fields("refused", "container mcp_servers fallbacks fallback_credit_token compaction thread",
             "nothing is run or stored here", (MESSAGES,)),
)  # fmt: skip
