"""A drafter that guesses a block of tokens in one pass, and answers for every node of a tree from it.

The guesses are marginals: they do not depend on the tokens between. A node at depth d is continued by the guess of
place d, so that rows below a tree's root cost nothing, however many they are; only what may come after a node, by a
grammar or a penalty, is asked of its own path. What stays in the cache are the
target's features of committed tokens, made keys and values; the block's own never do. Legend: s places guessed, h the
drafter's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edgespec.config import DraftSampling
from edgespec.draft.dflash_network import GuessedBlock
from edgespec.draft.distributions import (
    Distributions,
    LazyDistributions,
    SharedDistributions,
    rows_made_at_once,
    whole,
)
from edgespec.draft.language_model import NOT_FINITE, LanguageModelDrafter, refuse_not_finite
from edgespec.draft.markov import MarkovHead, bias_of
from edgespec.draft.selector import CandidateSelector, PlaceCandidates
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows
from edgespec.model.text_cache import TextCache
from edgespec.to_device import on_device


class BlockDrafter(LanguageModelDrafter):
    """Drafts with a block drafter of the target, whose text `target` is."""

    def __init__(
        self,
        model: CausalModel,
        target: TextCache,
        *,
        vocab: int,
        sampling: DraftSampling,
        cache: TextCache | None = None,
    ) -> None:
        """Read the features of `target`, which must keep them and be at the same text."""
        super().__init__(model, vocab=vocab, sampling=sampling, cache=cache)
        block = model.model.block
        assert isinstance(block, GuessedBlock)
        self._target, self._block = target, block
        self._num_slots = self.max_depth = block.num_places
        self._slots: Tensor  # [s, h], the last hidden states of the places of this tree's block
        self._places: Tensor  # [s, V], the logits of the places, where paths count
        self._table: Tensor  # [s + 1, vocab], else q of the places; behind them nothing is proposed
        self._depths: Tensor  # [row], of this tree's rows

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Return q [k, vocab] after nodes of tokens [k] below parent_rows [k]."""
        (q,) = expand_blocks([(self, tokens, parent_rows)])
        if isinstance(q, EdgespecError):
            raise q
        return whole(q)

    def hidden(self, rows: Tensor) -> Tensor:
        """Return the last hidden states [k, h] of the places that continue this tree's rows [k]."""
        return self._slots[self._depths[rows].clamp(max=self._num_slots - 1)]

    def context_rows(self) -> PassRows | None:
        """Return the rows of the text's features that the cache lacks, for a pass; None where it has all."""
        self.cache.truncate()  # the block of a tree that was not verified
        return self.text_rows(len(self._pending)) if self._pending else None

    def text_rows(self, count: int) -> PassRows:
        """Return the rows of the features of the next `count` pending tokens, for a pass."""
        self.cache.truncate()
        first, end = len(self.cache.ids), len(self.cache.ids) + count
        positions = torch.arange(first, end, device=self.model.device)
        return PassRows(
            cache=self.cache,
            ids=self._known(self._true(on_device(self._pending[:count], self.model.device))),
            positions=positions,
            previous=self._target.features_before(first + 1, end + 1),  # each token's own
            seen=self._seen_rows(positions),
        )

    def block_rows(self, root: Tensor) -> PassRows:
        """Return the rows of the block behind the text, whose features the cache now has, for a pass."""
        self.cache.commit_next(self._known_ids(self._pending))
        self._pending = []
        size, start = self._block.size, len(self.cache.ids)
        positions = torch.arange(start, start + size, device=root.device)
        return PassRows(
            cache=self.cache,
            ids=torch.cat([self._known(root), root.new_full((size - 1,), self._block.mask_token)]),
            positions=positions,
            visible=torch.ones(size, size, dtype=torch.bool, device=root.device),  # causal layers hide more
            seen=self._seen_rows(positions),
        )

    def took_block(self, hidden: Tensor) -> None:
        """Take the last hidden states [size, h] of the block; raises EdgespecError where logits are not finite."""
        self._took_places(hidden)
        if self.process is None:
            q = self.q_of(self._slots, is_checked=True)
            self._table = torch.cat([q, torch.zeros_like(q[:1])])
        else:
            self._made_logits()

    def _took_places(self, hidden: Tensor) -> None:
        """Begin a tree with the last hidden states [size, h] of its block."""
        self._slots = hidden[self._block.first_slot :]
        self._num_rows = 0
        self._depths = torch.zeros(0, dtype=torch.long, device=hidden.device)

    def _made_logits(self) -> None:
        """Make the logits of the places; raises EdgespecError where they are not finite."""
        self._places = self.model.logits(self._slots)
        refuse_not_finite(self._places)

    def answer(self, tokens: Tensor, parent_rows: Tensor) -> Distributions:
        """Return q after nodes of tokens [k] below parent_rows [k] (root: -1), as the block has it."""
        depths = self.took_nodes(tokens, parent_rows)
        if self.process is not None:
            return self.own_q(depths, lambda _rows, places: self._places[places])
        places = depths.clamp(max=self._num_slots)
        first, last = torch.stack(places.aminmax()).tolist()  # growth asks for a layer, which is one place
        return SharedDistributions(q=self._table[first : last + 1], which=places - first)

    def own_q(self, depths: Tensor, logits_of: Callable[[Tensor, Tensor], Tensor]) -> Distributions:
        """Return q of the last nodes, of depths [k], by their own paths.

        `logits_of` gives logits [j, V] of some of these rows [j], which stand before places [j].
        """
        paths = self.last_paths(depths.shape[0])

        def q_of(rows: Tensor) -> Tensor:
            logits = logits_of(rows, depths[rows].clamp(max=self._num_slots - 1))
            q = self._probabilities(logits, None if paths is None else [paths[row] for row in rows.tolist()])
            return q.masked_fill(depths[rows, None] >= self._num_slots, 0)  # behind the block nothing is proposed

        every = torch.arange(depths.shape[0], device=depths.device)
        if depths.shape[0] <= rows_made_at_once(self.model.vocab):
            return q_of(every)
        return LazyDistributions(hidden=every, q_of=q_of, vocab=self.model.vocab)

    def took_nodes(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Count nodes of tokens [k] below parent_rows [k] (root: -1) as rows of the tree; return their depths [k]."""
        is_root = self._num_rows == 0
        depths = torch.zeros_like(parent_rows) if is_root else self._depths[parent_rows] + 1
        self.took_paths(tokens, parent_rows)
        self._depths = torch.cat([self._depths, depths])
        self._num_rows += depths.shape[0]
        return depths

    def _num_lasting(self, rows: list[int]) -> int:
        """Return 0: what the block's rows saw is not what the text's rows see."""
        del rows
        return 0


def expand_blocks(
    expansions: Sequence[tuple[BlockDrafter, Tensor, Tensor]],
) -> list[Distributions | EdgespecError]:
    """Return the result of `expand` for each drafter's tokens [k] and parent rows [k].

    The drafters, one for each text, have one model: the blocks of those at their roots are read in one pass.
    """
    roots = [(drafter, tokens) for drafter, tokens, _ in expansions if drafter.num_rows == 0]
    failed: dict[BlockDrafter, EdgespecError] = {}
    if roots:
        model = roots[0][0].model
        contexts = [rows for drafter, _ in roots if (rows := drafter.context_rows()) is not None]
        if contexts:
            model.read(contexts)
        read = model.read([drafter.block_rows(tokens) for drafter, tokens in roots])
        is_finite = torch.stack([hidden.isfinite().all() for hidden in read]).tolist()
        for (drafter, _), hidden, is_sound in zip(roots, read, is_finite, strict=True):
            try:
                if not is_sound:
                    raise NOT_FINITE
                drafter.took_block(hidden)
            except EdgespecError as error:
                failed[drafter] = error
    return [failed.get(drafter) or drafter.answer(tokens, parents) for drafter, tokens, parents in expansions]


class MarkovBlockDrafter(BlockDrafter):
    """Drafts with a DSpark drafter of the target (arXiv 2607.05147), whose guesses depend on the token before them.

    What a node's children are likely to be is the logits of their place and a bias of the node's token, of rank r, so
    that a tree has the distributions of its own paths.
    """

    # What it has for places, [s, V], are logits without a bias.
    _states: Tensor  # [row, r], of this tree's rows

    @property
    def _markov(self) -> MarkovHead:
        markov = self.model.model.markov
        assert isinstance(markov, MarkovHead)
        return markov

    def took_block(self, hidden: Tensor) -> None:
        """Take the last hidden states [size, h] of the block; raises EdgespecError where logits are not finite."""
        self._took_places(hidden)
        self._states = hidden.new_zeros(0, self._markov.rank)
        self._made_logits()

    @torch.no_grad()
    def answer(self, tokens: Tensor, parent_rows: Tensor) -> Distributions:
        """Return q after nodes of tokens [k] below parent_rows [k] (root: -1)."""
        is_root = self._num_rows == 0
        before = self._states.new_zeros(1, self._markov.rank) if is_root else self._states[parent_rows]
        depths = self.took_nodes(tokens, parent_rows)
        latent, states = self._markov(tokens, self._slots[depths.clamp(max=self._num_slots - 1)], before)
        self._states = torch.cat([self._states, states])
        return self.own_q(depths, lambda rows, places: self._places[places] + self._bias(latent[rows]))

    def _bias(self, latent: Tensor) -> Tensor:
        """Return what is added to the logits of all tokens [k, V]."""
        return bias_of(self.model.model, latent, self.model.vocab)


class SelectorBlockDrafter(BlockDrafter):
    """Drafts with a DFlash2 drafter of the target, whose places have few candidates.

    A node's children are the candidates of their place, scored by the node's token. Where tokens that sampling cuts off
    keep a part of q, as for coupled children, which are the better the closer q is to p, so do tokens that are no
    candidates: candidates share what their place gives them together.
    """

    # What it has for places, [s, V], are logits before candidates are scored.
    _candidates: PlaceCandidates  # of the places of this tree's block

    @property
    def _selector(self) -> CandidateSelector:
        selector = self.model.model.selector
        assert isinstance(selector, CandidateSelector)
        return selector

    @torch.no_grad()
    def took_block(self, hidden: Tensor) -> None:
        """Take the last hidden states [size, h] of the block; raises EdgespecError where logits are not finite."""
        self._took_places(hidden)
        self._made_logits()
        keeps_others = self.sampling.tail_share > 0
        self._candidates = self._selector.candidates(self._places, self._slots, keeps_others=keeps_others)

    @torch.no_grad()
    def answer(self, tokens: Tensor, parent_rows: Tensor) -> Distributions:
        """Return q after nodes of tokens [k] below parent_rows [k] (root: -1)."""
        depths, selector = self.took_nodes(tokens, parent_rows), self._selector
        return self.own_q(depths, lambda rows, places: selector.scored(self._candidates, places, tokens[rows]))
