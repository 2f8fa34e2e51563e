"""How well a published draft agrees with its target, as its folder is read and in other ways.

A wrong choice of features gives no error: only fewer tokens are accepted. So a text is read once by the target, and the
draft's distributions are compared with the target's: after the target's own features, and one token deeper, after the
draft's own output or at the second place of a block. Another reading is taken where it is surely better on the same
tokens and surely pays (`paired_tokens.py`), however good or poor the draft is, and on further texts, too. Legend: t
tokens of the text, h the draft's width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from edgespec.draft.own_parts import aux_states_of, lent_layers
from edgespec.draft.paired_tokens import Shared, agrees_more, gain_of, is_surely_closer, surely_agrees_more
from edgespec.draft.readings import AS_STATED, Reading, has_depths, read_as, readings_of, recycles
from edgespec.draft.teacher_forcing import Guesses, Wanted
from edgespec.draft.teacher_forcing import guesses_of as _guesses
from edgespec.model.causal_model import CausalModel
from edgespec.model.row_chunks import row_chunks
from edgespec.model.text_cache import UncachedText

CHECK_TOKENS = 256  # of a text
CHECK_TEXTS = 4  # that are read where another reading seems better
LEAST_TOKENS = 32  # of a text that says anything
MOST_WANTED = 64  # of the target's likeliest tokens that are looked at: with others little is accepted
STEPS = (1, -1)  # tokens that features or drafted rows are moved by, to name a fault: positions that are off by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The shares of tokens of which the draft's likeliest is the target's."""

    first: float
    second: float

    @classmethod
    def of(cls, guesses: Guesses) -> Agreement:
        """Return the shares of these guesses."""
        return cls(first=guesses.first.share, second=guesses.second.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """What would agree better still a token later or earlier: nothing can be read so, and a fault has a name."""

    what: Literal["features", "rows"]  # the target's features, or rows that the draft adds to the text
    later: int  # by so many tokens
    agreement: Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A draft's agreement as stated, and in the reading that agrees best."""

    stated: Agreement
    best: Agreement
    reading: Reading
    misplaced: Misplaced | None = None


GuessesIn = Callable[[Reading, int, int], Guesses]  # in a reading, with features and drafted rows so much later
IsBetter = Callable[[Shared, Shared], bool]  # what a reading shares with the target, and what another one shares


@torch.no_grad()
def compare_readings(target: CausalModel, draft: CausalModel, ids: Tensor, *further: Tensor) -> Comparison:
    """Return how a draft agrees with its target on a text [t], which the target reads once.

    Where another reading seems better, or something seems misplaced, `further` texts are read, too: on all of them
    together it has to be surely better, by more than chance gives the best of so many. In doubt the folder is right.
    """
    num_layers = int(target.config.num_hidden_layers)
    readings, aux_states = readings_of(draft.model, num_layers=num_layers), aux_states_of(draft.model)
    aux_layers = () if aux_states is None else aux_states.layers
    layers = {layer + reading.shift for reading in readings for layer in aux_layers}
    layers |= {num_layers for reading in readings if reading.before_norm}

    def guesses_in(text: Tensor) -> GuessesIn:
        kept = UncachedText(lent.values()) if (lent := lent_layers(draft.model)) else None
        hidden, states = target.states_of_texts([text], layers, kept)
        wanted = replace(_wanted(target, hidden), kept=kept)

        @functools.cache
        def guesses(reading: Reading, features_later: int = 0, rows_later: int = 0) -> Guesses:
            with read_as(draft.model, reading, num_layers=num_layers):
                features = _shifted(_features(draft, hidden, states), features_later)
                return _guesses(draft, text, features, wanted, late=rows_later)

        return guesses

    texts = [guesses_in(ids)]
    found = _compared(texts[0], readings, draft, agrees_more)
    if found.reading == AS_STATED and found.misplaced is None:
        return found
    texts += [guesses_in(text) for text in further]

    def of_all(*which: Any) -> Guesses:
        return functools.reduce(Guesses.beside, (guesses(*which) for guesses in texts))

    num_tried = len(readings) - 1 + recycles(draft.model)
    return _compared(of_all, readings, draft, functools.partial(surely_agrees_more, num_tried=num_tried))


def _compared(guesses: GuessesIn, readings: Sequence[Reading], draft: CausalModel, is_better: IsBetter) -> Comparison:
    """Return the comparison by these guesses."""
    found = {reading: guesses(reading, 0, 0) for reading in readings}
    stated = found[AS_STATED]
    best = max(readings, key=lambda reading: float(found[reading].both.accepted.sum()))
    best = best if is_better(found[best].both, stated.both) else AS_STATED
    if recycles(draft.model):
        other = replace(best, flips_output=True)
        found[other] = guesses(other, 0, 0)
        best = other if is_better(found[other].second.shared, found[best].second.shared) else best
    return Comparison(
        stated=Agreement.of(stated), best=Agreement.of(found[best]), reading=best,
        misplaced=_misplaced(guesses, best, found[best], is_better, has_depths=has_depths(draft.model)),
    )  # fmt: skip


def _misplaced(
    guesses: GuessesIn, best: Reading, as_read: Guesses, is_better: IsBetter, *, has_depths: bool
) -> Misplaced | None:
    """Return what is better placed a token later or earlier than it is read; None where nothing surely is.

    Features are moved where a draft has two depths to compare. One later helps at some depth even if nothing is wrong,
    because it knows more of the tokens to guess: a head's first, or a block's second. One that was missing helps at
    both, and most with the nearest token.
    """
    for step in STEPS if has_depths else ():
        off = guesses(best, step, 0)
        depths = [(ours.shared, theirs.shared) for ours, theirs in zip(off.depths, as_read.depths, strict=True)]
        nearest, deeper = (gain_of(ours, theirs) for ours, theirs in depths)
        are_sure = all(is_surely_closer(ours, theirs) for ours, theirs in depths)
        if are_sure and nearest >= deeper and is_better(off.both, as_read.both):
            return Misplaced(what="features", later=step, agreement=Agreement.of(off))
    for step in STEPS:
        off = guesses(best, 0, step)
        if is_better(off.both, as_read.both):
            return Misplaced(what="rows", later=step, agreement=Agreement.of(off))
    return None


def _shifted(features: Tensor, offset: int) -> Tensor:
    """Return in each token's place the features [t, h] of so many tokens later; zeros where there is no such token."""
    moved = features.roll(-offset, 0)
    if offset > 0:
        moved[-offset:] = 0
    elif offset < 0:
        moved[:-offset] = 0
    return moved


def _features(draft: CausalModel, hidden: Tensor, states: Mapping[int, Tensor]) -> Tensor:
    """Return what a draft reads [t, h] of the target's last hidden states [t, h], or of those between layers."""
    aux_states = aux_states_of(draft.model)
    return hidden if aux_states is None else aux_states.features(states)


def _wanted(target: CausalModel, hidden: Tensor) -> Wanted:
    """Return what a target makes of these last hidden states [t, h]."""
    chunks = row_chunks(hidden.shape[0], target.vocab)
    most = min(MOST_WANTED, target.vocab)
    likeliest = [target.logits(hidden[rows]).softmax(-1).topk(most) for rows in chunks]
    return Wanted(tokens=torch.cat([one.indices for one in likeliest]), p=torch.cat([one.values for one in likeliest]))
