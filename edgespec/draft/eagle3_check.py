"""How well an EAGLE-3 head agrees with its target, as its folder is read and in other ways.

A wrong choice of features gives no error: only fewer tokens are accepted. So a text is read once by the target, and the
head's likeliest tokens are compared with the target's: after the target's own features, and one token deeper, after the
head's own output. Legend: t tokens of the text, h the head's width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
CLEARLY = 0.1  # more agreement, for which another reading is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A way to read a head, against what its folder states."""

    shift: int = 0  # layers later that the hidden states are taken
    flips_residual: bool = False  # norm_before_residual is the other way round
    flips_output: bool = False  # norm_output is the other way round


AS_STATED = Reading()
READINGS = (AS_STATED, Reading(shift=1), Reading(shift=-1), Reading(flips_residual=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The shares of tokens of which the head's likeliest is the target's."""

    first: float  # after the target's own features
    second: float  # one token deeper


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
        undone = Reading(shift=-reading.shift, flips_residual=reading.flips_residual, flips_output=reading.flips_output)
        apply_reading(draft, undone)


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
    hidden, states = target.states_of_text(ids, layers)
    likeliest = _likeliest(target, hidden)

    def agreement(reading: Reading) -> Agreement:
        with _read_as(draft.model, reading):
            own = taps_of(draft.model)
            assert own is not None
            return _agreement(draft, ids, own.features(states), likeliest)

    found = {reading: agreement(reading) for reading in readings}
    stated = found[AS_STATED]
    best = max(readings, key=lambda reading: found[reading].first)
    best = best if found[best].first >= stated.first + CLEARLY else AS_STATED
    other = Reading(shift=best.shift, flips_residual=best.flips_residual, flips_output=True)
    deeper = agreement(other)
    if deeper.second >= found[best].second + CLEARLY:
        return Comparison(stated=stated, best=deeper, reading=other)
    return Comparison(stated=stated, best=found[best], reading=best)


def _agreement(draft: CausalModel, ids: Tensor, features: Tensor, likeliest: Tensor) -> Agreement:
    """Return the agreement of a head that reads these features [t, h] of the text's tokens."""
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
    return Agreement(
        first=_share(_likeliest(draft, outputs[1:]), likeliest[1:]),
        second=_share(_likeliest(draft, deeper), likeliest[2:]),
    )


def _likeliest(model: CausalModel, hidden: Tensor) -> Tensor:
    """Return the likeliest token [k] after each of these last hidden states [k, h]."""
    return torch.cat([model.logits(hidden[rows]).argmax(-1) for rows in row_chunks(hidden.shape[0], model.vocab)])


def _share(ours: Tensor, theirs: Tensor) -> float:
    return float((ours == theirs).float().mean())
