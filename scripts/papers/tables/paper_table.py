"""One figure or table of a paper: what is noted at a context, and what all contexts say together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.grow import Growth
from edgespec.grow.batched import grown
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from scripts.papers.compare_policies import Bench, resampled_means

NUM_BINS = 10
ENDS = torch.tensor([0.025, 0.975], dtype=torch.float64)  # of a 95 % interval


@dataclass(kw_only=True)
class Context:
    """A held-out text in front of both models."""

    bench: Bench
    number: int
    seed: int
    _drafters: dict[SamplingSettings, LanguageModelDrafter] = field(default_factory=dict)  # at the text

    def grow(self, settings: TreeSettings, sampling: SamplingSettings) -> TokenTree:
        """The tree that the policy grows here."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.number)
        return self.bench.grow(settings, sampling, self._drafter(settings, sampling), self.number, 0, generator)

    def grow_otherwise(self, growth: Growth, settings: TreeSettings, sampling: SamplingSettings) -> TokenTree:
        """The tree that comes of a growth that no policy has, drafted as the policy's trees are."""
        drafter = self._drafter(settings, sampling)
        drafter.sampling = settings.draft_sampling(sampling)
        tree = grown(growth, drafter)
        drafter.rewind()
        return tree

    def _drafter(self, settings: TreeSettings, sampling: SamplingSettings) -> LanguageModelDrafter:
        if sampling not in self._drafters:
            self._drafters[sampling] = self.bench.drafter(settings, sampling)
        return self._drafters[sampling]

    def num_accepted(self, tree: TokenTree, sampling: SamplingSettings) -> int:
        """How many nodes below the root the target's own text goes through."""
        return len(self.path(tree, sampling)) - 1

    def path(self, tree: TokenTree, sampling: SamplingSettings) -> list[int]:
        """The nodes that the target's own text goes through, the root first."""
        return self.bench.path(tree, sampling, self.number, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """An experiment. `visit` notes something at a context; `show` prints what all contexts have noted."""

    name: str
    source: str  # paper, and figure or table
    claim: str  # what it says there
    visit: Callable[[Context], Any]
    show: Callable[[Sequence[Any]], list[str]]


def shares(counts: Sequence[Tensor]) -> list[str]:
    """Sums over contexts [bins, 2] of some quantity and its weight, as 'mean (low to high)' of each bin."""
    every = torch.stack([count.double() for count in counts])  # [contexts, bins, 2]
    rates = [means[..., 0] / means[..., 1].clamp(min=1e-12) for means in (every.mean(0), resampled(every))]
    has_some = every.sum(0)[:, 1] > 0
    return [
        with_interval(rate, drawn, digits=3) if some else "-"
        for rate, drawn, some in zip(rates[0], rates[1].unbind(1), has_some, strict=True)
    ]


def in_words(values: Sequence[float], digits: int = 2) -> str:
    """The mean over contexts, and its 95 % interval, as 'mean (low to high)'."""
    every = torch.tensor(values, dtype=torch.float64)
    return with_interval(every.mean(), resampled(every), digits=digits)


def resampled(every: Tensor) -> Tensor:
    """The means [bootstraps, ...] of contexts that are drawn anew from [contexts, ...], the same for all tables."""
    return resampled_means(every, torch.Generator().manual_seed(0))


def with_interval(value: Tensor, drawn: Tensor, *, digits: int = 2) -> str:
    """A number, and the 95 % interval that its values [bootstraps] have, as 'value (low to high)'."""
    low, high = drawn.nanquantile(ENDS).tolist()
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def in_bins(where: Tensor, what: Tensor, weights: Tensor) -> Tensor:
    """Sums of `what` and of `weights` [n] by ten bins of `where` in [0, 1]: [bins, 2]."""
    number = (where * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    sums = torch.zeros(NUM_BINS, 2, dtype=torch.float64)
    sums[:, 0].index_add_(0, number, (what * weights).double())
    sums[:, 1].index_add_(0, number, weights.double())
    return sums


def bin_names() -> list[str]:
    """The ends of each bin."""
    return [f"{number / NUM_BINS:.1f} to {(number + 1) / NUM_BINS:.1f}" for number in range(NUM_BINS)]


def markdown(cells: Sequence[Sequence[str]]) -> list[str]:
    """A table; the first row is its heading."""
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"|{' --- |' * len(cells[0])}", *lines[1:]]
