"""Tokens that options name, by their ids or a bias by their text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgespec.config import SamplingSettings, require
from edgespec.text.token_ids import encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.pair.pair import ModelPair

_ID = re.compile("[0-9]{1,18}")


def token_named(name: str) -> int | str:
    """Return the token of a name on a command line or in JSON: digits are an id, all else is a text."""
    return int(name) if _ID.fullmatch(name) else name


def with_token_ids(sampling: SamplingSettings, pair: ModelPair) -> SamplingSettings:
    """Return the settings with a bias of ids alone; raises EdgespecError for a token that the model lacks."""
    if not sampling.logit_bias:
        return sampling
    found: dict[int | str, float] = {}
    named: dict[int, int | str] = {}
    for token, bias in dict(sampling.logit_bias).items():
        index = token if isinstance(token, int) else _id_of(token, pair.tokenizer)
        names = f"{named.get(index)!r} and {token!r}"
        require(index not in named, f"`logit_bias` names one token twice: {names}.", "Keep one of them.")
        found[index], named[index] = bias, token
    known_ids("logit_bias", named, pair)
    return replace(sampling, logit_bias=found)


def known_ids(name: str, value: int | Iterable[int], pair: ModelPair) -> frozenset[int]:
    """Return the ids that an option names; raises EdgespecError for one that the model lacks."""
    ids = frozenset((value,) if isinstance(value, int) else value)
    odd = next((token for token in sorted(ids) if not 0 <= token < pair.vocab), None)
    what = f"`{name}` has token {odd}, and the model knows {pair.vocab} tokens."
    require(odd is None, what, f"Use 0 to {pair.vocab - 1}.")
    return ids


def options_of_ends(ids: Iterable[int], pair: ModelPair, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the options of a text that ends at these tokens, too; raises EdgespecError for one that the model lacks.

    They end a text also where the model's own stop tokens are never drawn.
    """
    ends = known_ids("stop_token_ids", ids, pair)
    if not ignore_eos:
        return {"eos_token_id": sorted(ends | pair.stop_tokens)}
    suppressed = {*(pair.stop_tokens - ends), *pair.default_options().get("suppress_tokens", ())}
    return {"eos_token_id": sorted(ends), "ignore_eos": False, "suppress_tokens": sorted(suppressed)}


def _id_of(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    ids = encoded(tokenizer, text, add_special_tokens=False)
    require(
        len(ids) == 1,
        f"`logit_bias` names {text!r}, which is {len(ids)} tokens of this model: {', '.join(map(str, ids))}.",
        "Name a text that is one token, or a token's id.",
    )
    return ids[0]
