"""What a draft guesses of a text whose tokens are known, at two depths, and how much of it its target would accept.

The text is read once with the target's own features. One token deeper a head reads its own output, and a block has its
second place; the tokens between are the text's own. Legend: t tokens of the text, h the draft's width, k the target's
likeliest tokens, r the rank of a DSpark drafter's bias, j some of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edgespec.draft.assistant import lent_rows, recycled
from edgespec.draft.dflash_network import GuessedBlock
from edgespec.draft.markov import MarkovHead, bias_of
from edgespec.draft.paired_tokens import Shared
from edgespec.draft.readings import recycles
from edgespec.draft.selector import CandidateSelector
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.row_chunks import row_chunks
from edgespec.model.text_cache import TextCache

BLOCKS_AT_ONCE = 8
ByPath = Callable[[slice, Tensor], Tensor]  # some rows, and the logits [j, V] of their places -> those of their paths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """What the target makes of a text's tokens."""

    tokens: Tensor  # [t, k], the likeliest ones after each, the likeliest first
    p: Tensor  # [t, k]
    kept: TextCache | None = None  # the text's rows in layers that an assistant attends

    def at(self, rows: Tensor | slice) -> Wanted:
        """Return the same after some of the tokens."""
        return Wanted(tokens=self.tokens[rows], p=self.p[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guessed:
    """What a draft guesses of a text's tokens."""

    hits: Tensor  # [t] bool, whether its likeliest token is the target's
    shared: Shared  # what its distributions and the target's have in common

    def beside(self, other: Guessed) -> Guessed:
        """Return the guesses of these tokens and of those of another text."""
        return Guessed(hits=torch.cat([self.hits, other.hits]), shared=self.shared.beside(other.shared))

    @property
    def share(self) -> float:
        """The share of tokens whose likeliest is the target's."""
        return float(self.hits.float().mean())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guesses:
    """A draft's guesses at two depths, in one reading."""

    first: Guessed  # after the target's own features
    second: Guessed  # one token deeper
    apart: Shared | None = None  # what both have in common with the target, where there are several texts

    def beside(self, other: Guesses) -> Guesses:
        """Return the guesses of this text and of another."""
        first, second = self.first.beside(other.first), self.second.beside(other.second)
        return Guesses(first=first, second=second, apart=self.both.beside(other.both))

    @property
    def depths(self) -> tuple[Guessed, Guessed]:
        """Both, the nearest token first."""
        return self.first, self.second

    @property
    def both(self) -> Shared:
        """What both depths together have in common with the target."""
        return self.apart or self.first.shared.plus(self.second.shared)


def guesses_of(draft: CausalModel, ids: Tensor, features: Tensor, wanted: Wanted, *, late: int = 0) -> Guesses:
    """Return what a draft guesses that reads these features [t, h] of the text's tokens.

    Rows that it drafts, and none of the text's, stand `late` positions later than they should.
    """
    known = ids.masked_fill(ids >= draft.num_embeddings, 0)
    if wanted.kept is not None:
        return _guesses_of_assistant(draft, known, features, wanted, late, wanted.kept)
    if recycles(draft.model):
        return _guesses_of_head(draft, known, features, wanted, late)
    return _guesses_of_blocks(draft, known, features, wanted, late)


def _guesses_of_head(draft: CausalModel, known: Tensor, features: Tensor, wanted: Wanted, late: int) -> Guesses:
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
        positions=torch.cat([torch.arange(count, device=device), parents + 1 + late]),
        visible=torch.cat([sees_text, torch.eye(count - 2, dtype=torch.bool, device=device)], 1),
        previous=outputs[1:-1],
    )
    (deeper,) = draft.read([rows])
    return Guesses(
        first=_compared(draft, outputs[1:], wanted.at(slice(1, None))),
        second=_compared(draft, deeper, wanted.at(slice(2, None))),
    )


def _guesses_of_assistant(
    draft: CausalModel, known: Tensor, features: Tensor, wanted: Wanted, late: int, kept: TextCache
) -> Guesses:
    """Return the same of rows each of which attends the tokens before its root, as does what is one deeper."""
    cache, roots = draft.new_text(), torch.arange(1, known.shape[0] - 1, device=known.device)
    lent = lent_rows(draft.model, kept.layers, known.shape[0], roots)

    def read(ids: Tensor, previous: Tensor) -> Tensor:
        (hidden,) = draft.read([PassRows(cache=cache, ids=ids, positions=roots + late, previous=previous, lent=lent)])
        return hidden

    first = read(known[1:-1], features[:-2])
    second = read(known[2:], recycled(draft.model, first))
    return Guesses(
        first=_compared(draft, first, wanted.at(roots)), second=_compared(draft, second, wanted.at(roots + 1))
    )


def _guesses_of_blocks(draft: CausalModel, known: Tensor, features: Tensor, wanted: Wanted, late: int) -> Guesses:
    count, device, block = known.shape[0], known.device, draft.model.block
    assert isinstance(block, GuessedBlock)
    cache = draft.new_text()
    text = torch.arange(count, device=device)
    draft.read([PassRows(cache=cache, ids=known, positions=text, previous=features)])
    cache.commit_next(known.tolist())
    anchors = torch.arange(1, count - 1, device=device)  # the block's first row, whose token is known
    first, second = [], []
    for roots in anchors.split(BLOCKS_AT_ONCE):
        ids = torch.full((roots.shape[0], block.size), block.mask_token, device=device)
        ids[:, 0] = known[roots]
        own = torch.arange(ids.numel(), device=device) // block.size
        rows = PassRows(
            cache=cache,
            ids=ids.flatten(),
            positions=torch.cat([text, (roots[:, None] + late + torch.arange(block.size, device=device)).flatten()]),
            visible=torch.cat([text < roots.repeat_interleave(block.size)[:, None], own[:, None] == own], 1),
        )
        (hidden,) = draft.read([rows])
        cache.truncate()
        places = hidden.view(*ids.shape, -1)[:, block.first_slot : block.first_slot + 2]
        first.append(places[:, 0])
        second.append(places[:, -1])  # of a block of one place: the same again
    behind = min(1, block.num_places - 1)
    at_places = [torch.cat(first), torch.cat(second)]
    by_path = _by_path(draft, known, anchors, at_places, behind)
    return Guesses(
        first=_compared(draft, at_places[0], wanted.at(anchors), by_path[0]),
        second=_compared(draft, at_places[1], wanted.at(anchors + behind), by_path[1]),
    )


def _by_path(
    draft: CausalModel, known: Tensor, anchors: Tensor, hidden: list[Tensor], behind: int
) -> tuple[ByPath | None, ByPath | None]:
    """Return what the text's own tokens make of the logits of two places; None for a drafter that reads none."""
    markov, selector = (getattr(draft.model, name, None) for name in ("markov", "selector"))
    if isinstance(selector, CandidateSelector):

        def selected(rows: slice, logits: Tensor, *, place: int) -> Tensor:
            found: Tensor = selector(logits, hidden[place][rows], known[anchors + place * behind][rows])
            return found

        return partial(selected, place=0), partial(selected, place=1)
    if not isinstance(markov, MarkovHead):
        return None, None
    begun = hidden[0].new_zeros(anchors.shape[0], markov.rank)
    first, states = markov(known[anchors], hidden[0], begun)
    second = markov(known[anchors + 1], hidden[1], states)[0] if behind else first

    def biased(rows: slice, logits: Tensor, *, latent: Tensor) -> Tensor:
        return logits + bias_of(draft.model, latent[rows], draft.vocab)

    return partial(biased, latent=first), partial(biased, latent=second)


def _compared(draft: CausalModel, hidden: Tensor, wanted: Wanted, by_path: ByPath | None = None) -> Guessed:
    """Return what a draft guesses after these last hidden states [k, h], and what of it is accepted."""
    hits, accepted, affinity = [], [], []
    for rows in row_chunks(hidden.shape[0], draft.vocab):
        logits = draft.logits(hidden[rows])
        q = (logits if by_path is None else by_path(rows, logits)).softmax(-1)
        tokens, p = wanted.tokens[rows], wanted.p[rows]
        hits.append(q.argmax(-1) == tokens[:, 0])
        known = tokens.clamp(max=q.shape[-1] - 1)
        of_tokens = q.gather(-1, known).where(tokens == known, 0)
        accepted.append(torch.minimum(of_tokens, p).sum(-1).double())
        affinity.append((of_tokens * p).sqrt().sum(-1).double())
    return Guessed(hits=torch.cat(hits), shared=Shared(accepted=torch.cat(accepted), affinity=torch.cat(affinity)))
