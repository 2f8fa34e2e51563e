"""How well a published draft agrees with its target, as its folder is read and in other ways.

A wrong choice of features gives no error: only fewer tokens are accepted. So a text is read once by the target, and the
draft's distributions are compared with the target's: after the target's own features, and one token deeper, after the
draft's own output or at the second place of a block. Another reading is taken where more is accepted with it, and of
more tokens than chance explains, however good or poor the draft is. Legend: t tokens of the text, h the draft's width,
k the target's likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgespec.draft.dflash_network import GuessedBlock
from edgespec.draft.own_parts import taps_of
from edgespec.draft.readings import AS_STATED, Reading, read_as, readings_of, recycles
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.row_chunks import row_chunks

CHECK_TOKENS = 256
LEAST_TOKENS = 32  # of a text that says anything
CHANCE = 0.001  # by which one of two readings that are alike may seem better: of each that is tried
ROUNDING = 1e-5  # of what is accepted of a token
MOST_WANTED = 64  # of the target's likeliest tokens that are looked at: with others little is accepted
OFFSETS = (1, -1)  # tokens later whose features are tried, to name a fault: positions that are off by one
BLOCK_STEP = 2  # tokens from one block that is compared to the next
BLOCKS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """What the target makes of a text's tokens."""

    tokens: Tensor  # [t, k], the likeliest ones after each, the likeliest first
    p: Tensor  # [t, k]

    def at(self, rows: Tensor | slice) -> Wanted:
        """Return the same after some of the tokens."""
        return Wanted(tokens=self.tokens[rows], p=self.p[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guessed:
    """What a draft guesses of a text's tokens."""

    hits: Tensor  # [t] bool, whether its likeliest token is the target's
    accepted: Tensor  # [t], the chance that a token it draws is accepted: the sum of min(p, q)

    @property
    def share(self) -> float:
        """The share of tokens whose likeliest is the target's."""
        return float(self.hits.float().mean())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guesses:
    """A draft's guesses at two depths, in one reading."""

    first: Guessed  # after the target's own features
    second: Guessed  # one token deeper

    @property
    def accepted(self) -> Tensor:
        """What is accepted of both [t]."""
        count = self.second.accepted.shape[0]
        return self.first.accepted[:count] + self.second.accepted


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
class Comparison:
    """A draft's agreement as stated, and in the reading that agrees best."""

    stated: Agreement
    best: Agreement
    reading: Reading
    offset: int = 0  # tokens later, if not 0, whose features would agree better still: nothing can be read so
    at_offset: Agreement | None = None


@torch.no_grad()
def compare_readings(target: CausalModel, draft: CausalModel, ids: Tensor) -> Comparison:
    """Return how a draft agrees with its target on a text [t], which the target reads once."""
    num_layers = int(target.config.num_hidden_layers)
    readings, taps = readings_of(draft.model, num_layers=num_layers), taps_of(draft.model)
    tapped = () if taps is None else taps.layers
    layers = {layer + reading.shift for reading in readings for layer in tapped}
    layers |= {num_layers for reading in readings if reading.before_norm}
    hidden, states = target.states_of_texts([ids], layers)
    wanted = _wanted(target, hidden)

    def guesses(reading: Reading, offset: int = 0) -> Guesses:
        with read_as(draft.model, reading, num_layers=num_layers):
            return _guesses(draft, ids, _shifted(_features(draft, hidden, states), offset), wanted)

    found = {reading: guesses(reading) for reading in readings}
    stated = found[AS_STATED]
    best = max(readings, key=lambda reading: float(found[reading].accepted.sum()))
    best = best if agrees_more(found[best].accepted, stated.accepted) else AS_STATED
    agreed = Comparison(stated=Agreement.of(stated), best=Agreement.of(found[best]), reading=best)
    if not recycles(draft.model):
        return agreed
    other = replace(best, flips_output=True)
    found[other] = guesses(other)
    best = other if agrees_more(found[other].second.accepted, found[best].second.accepted) else best
    agreed = replace(agreed, best=Agreement.of(found[best]), reading=best)
    for offset in OFFSETS:
        off = guesses(best, offset)
        # At one depth alone this is no sign of anything: a later feature knows more of the next token.
        depths = ((off.first, found[best].first), (off.second, found[best].second))
        if all(agrees_more(ours.accepted, theirs.accepted) for ours, theirs in depths):
            return replace(agreed, offset=offset, at_offset=Agreement.of(off))
    return agreed


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
    taps = taps_of(draft.model)
    return hidden if taps is None else taps.features(states)


def agrees_more(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether more is accepted [t] in a reading than in another, and of more tokens than chance explains.

    Tokens of which both have as much accepted tell nothing; of the others each reading has half by chance (the sign
    test, with its exact tail).
    """
    wins, losses = int((ours > theirs + ROUNDING).sum()), int((theirs > ours + ROUNDING).sum())
    count = wins + losses
    outcomes = sum(math.comb(count, number) for number in range(wins, count + 1))
    return float((ours - theirs).mean()) > 0 and outcomes < CHANCE * float(2**count)


def _guesses(draft: CausalModel, ids: Tensor, features: Tensor, wanted: Wanted) -> Guesses:
    """Return what a draft guesses that reads these features [t, h] of the text's tokens."""
    known = ids.masked_fill(ids >= draft.num_embeddings, 0)
    if recycles(draft.model):
        return _guesses_of_head(draft, known, features, wanted)
    return _guesses_of_blocks(draft, known, features, wanted)


def _guesses_of_head(draft: CausalModel, known: Tensor, features: Tensor, wanted: Wanted) -> Guesses:
    count, device = known.shape[0], known.device
    cache = draft.new_text()
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
    return Guesses(
        first=_compared(draft, outputs[1:], wanted.at(slice(1, None))),
        second=_compared(draft, deeper, wanted.at(slice(2, None))),
    )


def _guesses_of_blocks(draft: CausalModel, known: Tensor, features: Tensor, wanted: Wanted) -> Guesses:
    count, device, block = known.shape[0], known.device, draft.model.block
    assert isinstance(block, GuessedBlock)
    cache = draft.new_text()
    text = torch.arange(count, device=device)
    draft.read([PassRows(cache=cache, ids=known, positions=text, previous=features)])
    cache.commit_next(known.tolist())
    anchors = torch.arange(1, count - 1, BLOCK_STEP, device=device)  # the block's first row, whose token is known
    first, second = [], []
    for roots in anchors.split(BLOCKS_AT_ONCE):
        ids = torch.full((roots.shape[0], block.size), block.mask_token, device=device)
        ids[:, 0] = known[roots]
        own = torch.arange(ids.numel(), device=device) // block.size
        rows = PassRows(
            cache=cache,
            ids=ids.flatten(),
            positions=torch.cat([text, (roots[:, None] + torch.arange(block.size, device=device)).flatten()]),
            visible=torch.cat([text < roots.repeat_interleave(block.size)[:, None], own[:, None] == own], 1),
        )
        (hidden,) = draft.read([rows])
        cache.truncate()
        places = hidden.view(*ids.shape, -1)[:, block.first_slot : block.first_slot + 2]
        first.append(places[:, 0])
        second.append(places[:, -1])  # of a block of one place: the same again
    behind = min(1, block.num_places - 1)
    return Guesses(
        first=_compared(draft, torch.cat(first), wanted.at(anchors)),
        second=_compared(draft, torch.cat(second), wanted.at(anchors + behind)),
    )


def _wanted(target: CausalModel, hidden: Tensor) -> Wanted:
    """Return what a target makes of these last hidden states [t, h]."""
    chunks = row_chunks(hidden.shape[0], target.vocab)
    most = min(MOST_WANTED, target.vocab)
    likeliest = [target.logits(hidden[rows]).softmax(-1).topk(most) for rows in chunks]
    return Wanted(tokens=torch.cat([one.indices for one in likeliest]), p=torch.cat([one.values for one in likeliest]))


def _compared(draft: CausalModel, hidden: Tensor, wanted: Wanted) -> Guessed:
    """Return what a draft guesses after these last hidden states [k, h], and what of it is accepted."""
    hits, accepted = [], []
    for rows in row_chunks(hidden.shape[0], draft.vocab):
        q = draft.logits(hidden[rows]).softmax(-1)
        tokens, p = wanted.tokens[rows], wanted.p[rows]
        hits.append(q.argmax(-1) == tokens[:, 0])
        known = tokens.clamp(max=q.shape[-1] - 1)
        shared = torch.minimum(q.gather(-1, known), p)
        accepted.append(shared.where(tokens == known, 0).sum(-1).double())
    return Guessed(hits=torch.cat(hits), accepted=torch.cat(accepted))
