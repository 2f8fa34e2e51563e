"""A request for one text, under the names that users of transformers know, made ready to run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from edgespec.config import DEFAULT_NEW_TOKENS, MAX_SEED, SamplingSettings, require
from edgespec.decode.sequence import TextSettings
from edgespec.errors import EdgespecError
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seen_prompt import keys_of, words_of
from edgespec.pair.adapters import AdapterChoice, chosen_use
from edgespec.pair.generation_config import OPTIONS, SAMPLING, undone
from edgespec.sampling.grammar import Grammar, json_schema_grammar, response_format_grammar
from edgespec.sampling.logprobs import check_num_logprobs
from edgespec.sampling.matcher import TokenGrammar, token_grammar
from edgespec.sampling.noise import DEFAULT_NAME, TextNoise, text_key
from edgespec.text.bias import known_ids, with_token_ids
from edgespec.text.context import new_token_limit
from edgespec.text.stops import StopStrings, stop_strings
from edgespec.validation import checked_options, shown

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from edgespec.pair.pair import ModelPair

_CONFIG_FIX = "Give a GenerationConfig of transformers, or a dict of its names."

Config: TypeAlias = "GenerationConfig | Mapping[str, Any]"


class TextOptions(TypedDict, total=False):
    """The options of a text; each has a default."""

    max_new_tokens: int | None  # -1: to the end of the context; None: 512
    max_length: int | None  # the prompt's tokens and the new ones; `max_new_tokens` counts above it
    min_new_tokens: int | None  # before which no stop token is drawn; None: the model's own
    min_length: int | None  # the prompt's tokens and those; `min_new_tokens` counts above it
    eos_token_id: int | Sequence[int] | None  # the tokens that end the text; None: the model's own
    suppress_tokens: Sequence[int] | None  # that are never drawn; None: the model's own
    sampling: SamplingSettings | None  # None: the model's own; single values below count above it
    do_sample: bool  # False is temperature 0
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int | str, float]  # a token's id, or a text that is one token -> what its logit gains
    ignore_eos: bool  # True: the model's stop tokens are never drawn
    seed: int | None  # None: a random one
    name: str  # separates the draws of texts with one seed, as a row's id does; "0" by default
    stop: str | Sequence[str]  # strings that end the text, and are no part of it
    skip_special_tokens: bool  # False: the text has them, but for the one that ends it
    logprobs: int | None  # the number of alternatives beside each new token; None: no log-probabilities
    prompt_logprobs: int | None  # the same beside the prompt's tokens; `max_new_tokens=0` then writes nothing
    cache_prompt: bool  # False: the prompt is read anew, whichever of its rows are cached
    adapters: (
        AdapterChoice | None
    )  # of the engine's, by name, with or without a scale; None: all with a scale; []: none
    json_schema: str | Mapping[str, Any]  # that the text must fit, as JSON or as what it stands for
    grammar: str | Grammar | None  # that the text must match, in Lark's form or in GBNF
    response_format: Mapping[str, Any]  # OpenAI's form of such a schema
    reasoning_budget: int | None  # tokens of thought before an answer to messages; None and -1: any number
    reasoning_budget_message: str  # before the words that close a thought whose budget is spent


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(TextSettings):
    """A text to decode: its prompt, its settings from its first token on, and what shapes it beside them."""

    ids: list[int]
    limited_by: str  # length | context: what ends the text after `max_new_tokens`
    seed: int
    name: str
    stop: StopStrings
    skip_special_tokens: bool = True  # of the text
    cache_prompt: bool = True  # whether it may begin on rows that are cached
    pictures: PicturePrompt | None = None  # the prompt as a processor made it, where it has pictures
    begun: tuple[int, ...] = ()  # new tokens that are there already: the text goes on after them

    @property
    def num_tokens(self) -> int:
        """The number of the prompt's tokens and of the new ones, at most."""
        return len(self.ids) + self.max_new_tokens

    @property
    def keys(self) -> list[int]:
        """The prompt's ids as rows are kept by them: those of pictures tell what they show."""
        return self.ids if self.pictures is None else keys_of(self.pictures)

    def settings(self, *, num_written: int) -> TextSettings:
        """Return the settings with which the text continues after `num_written` tokens of its own."""
        return replace(self, max_new_tokens=self.max_new_tokens - num_written, num_written=num_written)

    def noise(self, vocab: int, device: torch.device) -> TextNoise:
        """Return the noise that decides the text's tokens."""
        return TextNoise(seed=self.seed, key=text_key(self.name), vocab=vocab, device=device)


def text_request(
    prompt: list[int] | PicturePrompt, *, pair: ModelPair, max_context: int, config: Config | None, options: TextOptions
) -> TextRequest:
    """Make a prompt and its settings a request: `options` count above `config`, and that above the pair's own.

    Raises EdgespecError where the context is too short, and TypeError for an unknown option.
    """
    pictures = prompt if isinstance(prompt, PicturePrompt) else None
    ids = prompt.ids if isinstance(prompt, PicturePrompt) else prompt
    check_ids(ids if pictures is None else words_of(pictures), pair.vocab)
    chosen = pair.default_options() | config_values(config)
    base = named_sampling(pair.default_sampling(), {name: chosen.pop(name) for name in SAMPLING if name in chosen})
    chosen |= checked_options(TextOptions, options)
    seed = chosen.pop("seed", None)
    require(seed is None or 0 <= seed <= MAX_SEED, f"`seed={seed}` is not in [0, 2^63).", "Use another number.")
    num_prompt_logprobs = chosen.pop("prompt_logprobs", None)
    check_num_logprobs(num_prompt_logprobs)
    length = _max_new_tokens(chosen, len(ids))
    scores_only = length == 0 and num_prompt_logprobs is not None
    limit, limited_by = (0, "length") if scores_only else new_token_limit(max_context, len(ids), length)
    if scores_only and len(ids) > max_context:
        what = f"the prompt has {len(ids)} tokens, and the context holds {max_context}."
        raise EdgespecError("E_CONTEXT", what, "Shorten the prompt.")
    min_new_tokens = _min_new_tokens(chosen, len(ids))
    stop_tokens = pair.stop_tokens
    if "eos_token_id" in chosen:
        stop_tokens = known_ids("eos_token_id", chosen.pop("eos_token_id"), pair)
    suppressed = known_ids("suppress_tokens", chosen.pop("suppress_tokens", ()), pair)
    num_logprobs = chosen.pop("logprobs", None)
    check_num_logprobs(num_logprobs)
    most_thought, _ = chosen_reasoning(chosen)
    what = f"`reasoning_budget={most_thought}` bounds the thought before an answer, and this prompt is a text."
    require(most_thought in (None, -1), what, "Give messages, or leave it out.")
    grammar = chosen_grammar(chosen)
    name, skips = chosen.pop("name", DEFAULT_NAME), chosen.pop("skip_special_tokens", True)
    may_begin_on_cached = chosen.pop("cache_prompt", True)
    adapters = chosen_use(pair.target.adapters, chosen.pop("adapters", None))
    stop = stop_strings(pair.tokenizer, chosen.pop("stop", ()), keeps_special=not skips)
    sampling = with_token_ids(named_sampling(chosen.pop("sampling", base), chosen), pair)
    return TextRequest(
        ids=ids,
        max_new_tokens=limit,
        limited_by=limited_by,
        seed=secrets.randbits(32) if seed is None else seed,
        name=name,
        stop=stop,
        skip_special_tokens=skips,
        cache_prompt=may_begin_on_cached,
        pictures=pictures,
        adapters=adapters,
        sampling=sampling,
        grammar=None if grammar is None else grammar_for(grammar, sampling, pair, stop_tokens=stop_tokens),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        stop_tokens=stop_tokens,
        min_new_tokens=min_new_tokens,
        suppressed=suppressed,
    )


def _max_new_tokens(chosen: dict[str, Any], num_ids: int) -> int:
    max_length = chosen.pop("max_length", None)
    if max_length is None or "max_new_tokens" in chosen:
        return int(chosen.pop("max_new_tokens", DEFAULT_NEW_TOKENS))
    what = f"max_length={max_length} has no room for a new token: the prompt has {num_ids}."
    require(max_length > num_ids, what, "Give `max_new_tokens`, or a larger max_length.")
    return int(max_length) - num_ids


def _min_new_tokens(chosen: dict[str, Any], num_ids: int) -> int:
    least = {name: chosen.pop(name, 0) for name in ("min_length", "min_new_tokens")}
    for name, value in least.items():
        require(value >= 0, f"`{name}={value}` is negative.", "0 is none.")
    return int(least["min_new_tokens"] or max(0, least["min_length"] - num_ids))


def grammar_for(
    grammar: Grammar, sampling: SamplingSettings, pair: ModelPair, *, stop_tokens: frozenset[int] | None = None
) -> TokenGrammar:
    """Return a grammar over the pair's tokens for texts that are sampled so; raises EdgespecError."""
    ends = frozenset[int]() if sampling.ignore_eos else pair.stop_tokens if stop_tokens is None else stop_tokens
    return token_grammar(grammar, pair.tokenizer, vocab=pair.vocab, stop_tokens=ends)


def check_ids(ids: Sequence[int], num_ids: int) -> None:
    """Raise EdgespecError for a prompt without tokens, or with one that the model has not."""
    if not ids:
        raise EdgespecError("E_PROMPT_EMPTY", "the prompt has no tokens.", "Give at least one character.")
    odd = next((token for token in (min(ids), max(ids)) if not 0 <= token < num_ids), None)
    if odd is not None:
        what = f"the prompt has token id {odd}, and the model knows {num_ids} tokens."
        raise EdgespecError("E_PROMPT_INVALID", what, f"Use 0 to {num_ids - 1}.")


def chosen_grammar(chosen: MutableMapping[str, Any]) -> Grammar | None:
    """Take the grammar out of the options; raises EdgespecError where there are several."""
    grammars = {name: chosen.pop(name) for name in ("json_schema", "grammar", "response_format") if name in chosen}
    what = f"a text has one grammar, and {len(grammars)} are given."
    require(len(grammars) <= 1, what, "Give `json_schema`, `grammar` or a response_format.")
    if "json_schema" in grammars:
        return json_schema_grammar(grammars["json_schema"])
    if "response_format" in grammars:
        return response_format_grammar(grammars["response_format"])
    grammar = grammars.get("grammar")
    return Grammar(form="grammar", text=grammar) if isinstance(grammar, str) else grammar


def chosen_reasoning(chosen: MutableMapping[str, Any]) -> tuple[int | None, str]:
    """Take the tokens of thought out of the options, and what is said behind them; raises EdgespecError."""
    most, message = chosen.pop("reasoning_budget", None), chosen.pop("reasoning_budget_message", "")
    what = f"`reasoning_budget={most}` is below -1."
    require(most is None or most >= -1, what, "Give a number of tokens, 0 for no thought, or -1 for any number.")
    require(not message or most not in (None, -1), "`reasoning_budget_message` needs `reasoning_budget`.", "Give both.")
    return most, message


def named_sampling(base: SamplingSettings, values: Mapping[str, Any]) -> SamplingSettings:
    """Return `base` with single values changed; raises TypeError for an unknown name."""
    values = dict(values)
    do_sample = values.pop("do_sample", None)
    if do_sample is False:
        values["temperature"] = 0.0
    elif do_sample and "temperature" not in values and base.temperature == 0:
        values["temperature"] = 1.0  # as transformers
    return replace(base, **values)


def config_values(config: Config | None) -> dict[str, Any]:
    """Return a generation config as options; raises EdgespecError for a setting that edgespec does not have."""
    if config is None:
        return {}
    is_object = hasattr(config, "to_diff_dict")
    require(is_object or isinstance(config, Mapping), f"{shown(config)} is no generation config.", _CONFIG_FIX)
    stated = config.to_diff_dict() if is_object else dict(config)  # type: ignore[union-attr, arg-type]
    stated = {str(name): value for name, value in stated.items() if value is not None}
    values = {option: stated[name] for name, option in OPTIONS.items() if name in stated}
    unknown = sorted(undone(stated))
    if unknown:
        what = f"the generation config sets {', '.join(unknown)}, which edgespec does not do."
        raise EdgespecError("E_SETTING", what, f"It knows: {', '.join(OPTIONS)}.")
    return checked_options(TextOptions, values)
