"""How well an EAGLE-3 head agrees with its target, as its folder is read and in other ways.

A wrong choice of features gives no error: only fewer tokens are accepted. So a text is read once by the target, and the
head's likeliest tokens are compared with the target's: after the target's own features, and one token deeper, after the
head's own output. Another reading is taken where it agrees on more of the same tokens than chance explains, however
good or poor the head is. Legend: t tokens of the text, h the head's width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.draft.own_parts import taps_of
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.row_chunks import row_chunks
from edgespec.model.taps import Taps

CHECK_TOKENS = 256
LEAST_TOKENS = 32  # of a text that says anything
CHANCE = 0.001  # by which one of two readings that are alike may seem better: of each that is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A way to read a head, against what its folder states."""

    shift: int = 0  # layers later that the hidden states are taken
    flips_residual: bool = False  # norm_before_residual is the other way round
    flips_output: bool = False  # norm_output is the other way round
    swaps_inputs: bool = False  # attention reads the feature first, and the embedding second


AS_STATED = Reading()
READINGS = (
    AS_STATED,
    Reading(shift=1),
    Reading(shift=-1),
    Reading(flips_residual=True),
    Reading(swaps_inputs=True),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hits:
    """The tokens of a text [t] bool of which the head's likeliest is the target's."""

    first: Tensor  # after the target's own features
    second: Tensor  # one token deeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The shares of tokens of which the head's likeliest is the target's."""

    first: float
    second: float

    @classmethod
    def of(cls, hits: Hits) -> Agreement:
        """Return the shares of these tokens."""
        return cls(first=float(hits.first.float().mean()), second=float(hits.second.float().mean()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A head's agreement as stated, and in the reading that agrees best."""

    stated: Agreement
    best: Agreement
    reading: Reading


def apply_reading(draft: Any, reading: Reading) -> None:
    """Let a head be read so; what is flipped is flipped back by the same reading."""
    decoder, output, taps = draft.model, draft.lm_head, taps_of(draft)
    if reading.flips_residual:
        decoder.layers[0].norm_before_residual = not decoder.layers[0].norm_before_residual
    if reading.swaps_inputs:
        decoder.layers[0].has_feature_first = not decoder.layers[0].has_feature_first
    if reading.flips_output:
        decoder.norm, output.norm = output.norm, decoder.norm
    if reading.shift and taps is not None:
        draft.fuse.taps = Taps(layers=tuple(layer + reading.shift for layer in taps.layers), make=taps.make)


@contextmanager
def _read_as(draft: nn.Module, reading: Reading) -> Iterator[None]:
    apply_reading(draft, reading)
    try:
        yield
    finally:
        apply_reading(draft, replace(reading, shift=-reading.shift))


@torch.no_grad()
def compare_readings(target: CausalModel, draft: CausalModel, ids: Tensor) -> Comparison:
    """Return how a head agrees with its target on a text [t], which the target reads once."""
    taps = taps_of(draft.model)
    assert taps is not None
    num_layers = int(target.config.num_hidden_layers)
    readings = [
        reading for reading in READINGS if all(0 <= layer + reading.shift <= num_layers for layer in taps.layers)
    ]
    layers = {layer + reading.shift for reading in readings for layer in taps.layers}
    hidden, states = target.states_of_texts([ids], layers)
    likeliest = _likeliest(target, hidden)

    def hits(reading: Reading) -> Hits:
        with _read_as(draft.model, reading):
            own = taps_of(draft.model)
            assert own is not None
            return _hits(draft, ids, own.features(states), likeliest)

    found = {reading: hits(reading) for reading in readings}
    stated = found[AS_STATED]
    best = max(readings, key=lambda reading: int(found[reading].first.sum()))
    best = best if agrees_more(found[best].first, stated.first) else AS_STATED
    other = replace(best, flips_output=True)
    found[other] = hits(other)
    best = other if agrees_more(found[other].second, found[best].second) else best
    return Comparison(stated=Agreement.of(stated), best=Agreement.of(found[best]), reading=best)


def agrees_more(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether a reading agrees on more of the same tokens [t] bool than another, beyond chance.

    Tokens on which both agree, or neither, tell nothing; of the others each reading has half by chance (McNemar's
    test, with its exact tail).
    """
    wins, losses = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    count = wins + losses
    outcomes = sum(math.comb(count, number) for number in range(wins, count + 1))
    return outcomes < CHANCE * float(2**count)


def _hits(draft: CausalModel, ids: Tensor, features: Tensor, likeliest: Tensor) -> Hits:
    """Return where a head agrees that reads these features [t, h] of the text's tokens."""
    count, device = ids.shape[0], ids.device
    cache = draft.new_text()
    known = ids.masked_fill(ids >= draft.num_embeddings, 0)
    before = torch.cat([features.new_zeros(1, features.shape[1]), features[:-1]])
    (outputs,) = draft.read([next_rows(cache, known, previous=before)])
    # A child of each row but the first and the last: the text's next token, below the head's own output.
    parents = torch.arange(1, count - 1, device=device)
    sees_text = torch.arange(count, device=device) <= parents[:, None]
    rows = PassRows(
        cache=cache,
        ids=known[2:],
        positions=torch.cat([torch.arange(count, device=device), parents + 1]),
        visible=torch.cat([sees_text, torch.eye(count - 2, dtype=torch.bool, device=device)], 1),
        previous=outputs[1:-1],
    )
    (deeper,) = draft.read([rows])
    return Hits(
        first=_likeliest(draft, outputs[1:]) == likeliest[1:],
        second=_likeliest(draft, deeper) == likeliest[2:],
    )


def _likeliest(model: CausalModel, hidden: Tensor) -> Tensor:
    """Return the likeliest token [k] after each of these last hidden states [k, h]."""
    return torch.cat([model.logits(hidden[rows]).argmax(-1) for rows in row_chunks(hidden.shape[0], model.vocab)])
