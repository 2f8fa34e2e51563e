"""How well a published draft agrees with its target, as its folder is read and in other ways.

A wrong choice of features gives no error: only fewer tokens are accepted. So a text is read once by the target, and the
draft's likeliest tokens are compared with the target's: after the target's own features, and one token deeper, after
the draft's own output or at the second place of a block. Another reading is taken where it agrees on more of the same
tokens than chance explains, however good or poor the draft is. Legend: t tokens of the text, h the draft's width.
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
BLOCK_STEP = 2  # tokens from one block that is compared to the next
BLOCKS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hits:
    """The tokens of a text [t] bool of which the draft's likeliest is the target's."""

    first: Tensor  # after the target's own features
    second: Tensor  # one token deeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The shares of tokens of which the draft's likeliest is the target's."""

    first: float
    second: float

    @classmethod
    def of(cls, hits: Hits) -> Agreement:
        """Return the shares of these tokens."""
        return cls(first=float(hits.first.float().mean()), second=float(hits.second.float().mean()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A draft's agreement as stated, and in the reading that agrees best."""

    stated: Agreement
    best: Agreement
    reading: Reading


@torch.no_grad()
def compare_readings(target: CausalModel, draft: CausalModel, ids: Tensor) -> Comparison:
    """Return how a draft agrees with its target on a text [t], which the target reads once."""
    num_layers = int(target.config.num_hidden_layers)
    readings, taps = readings_of(draft.model, num_layers=num_layers), taps_of(draft.model)
    tapped = () if taps is None else taps.layers
    layers = {layer + reading.shift for reading in readings for layer in tapped}
    layers |= {num_layers for reading in readings if reading.before_norm}
    hidden, states = target.states_of_texts([ids], layers)
    likeliest = _likeliest(target, hidden)

    def hits(reading: Reading) -> Hits:
        with read_as(draft.model, reading, num_layers=num_layers):
            return _hits(draft, ids, _features(draft, hidden, states), likeliest)

    found = {reading: hits(reading) for reading in readings}
    stated = found[AS_STATED]
    best = max(readings, key=lambda reading: int(found[reading].first.sum()))
    best = best if agrees_more(found[best].first, stated.first) else AS_STATED
    if recycles(draft.model):
        other = replace(best, flips_output=True)
        found[other] = hits(other)
        best = other if agrees_more(found[other].second, found[best].second) else best
    return Comparison(stated=Agreement.of(stated), best=Agreement.of(found[best]), reading=best)


def _features(draft: CausalModel, hidden: Tensor, states: Mapping[int, Tensor]) -> Tensor:
    """Return what a draft reads [t, h] of the target's last hidden states [t, h], or of those between layers."""
    taps = taps_of(draft.model)
    return hidden if taps is None else taps.features(states)


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
    """Return where a draft agrees that reads these features [t, h] of the text's tokens."""
    known = ids.masked_fill(ids >= draft.num_embeddings, 0)
    if recycles(draft.model):
        return _hits_of_head(draft, known, features, likeliest)
    return _hits_of_blocks(draft, known, features, likeliest)


def _hits_of_head(draft: CausalModel, known: Tensor, features: Tensor, likeliest: Tensor) -> Hits:
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
    return Hits(
        first=_likeliest(draft, outputs[1:]) == likeliest[1:],
        second=_likeliest(draft, deeper) == likeliest[2:],
    )


def _hits_of_blocks(draft: CausalModel, known: Tensor, features: Tensor, likeliest: Tensor) -> Hits:
    count, device, block = known.shape[0], known.device, draft.model.block
    assert isinstance(block, GuessedBlock)
    cache = draft.new_text()
    text = torch.arange(count, device=device)
    draft.read([PassRows(cache=cache, ids=known, positions=text, previous=features)])
    cache.commit_next(known.tolist())
    anchors = torch.arange(1, count - 1, BLOCK_STEP, device=device)  # the block's first row, whose token is known
    guesses = []
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
        guesses.append(torch.stack([_likeliest(draft, place) for place in places.unbind(1)]))
    found = torch.cat(guesses, 1)  # [at most 2 places, anchors]
    return Hits(first=found[0] == likeliest[anchors], second=found[-1] == likeliest[anchors + found.shape[0] - 1])


def _likeliest(model: CausalModel, hidden: Tensor) -> Tensor:
    """Return the likeliest token [k] after each of these last hidden states [k, h]."""
    return torch.cat([model.logits(hidden[rows]).argmax(-1) for rows in row_chunks(hidden.shape[0], model.vocab)])
