"""One figure or table of a paper: what is noted at a context, and what all contexts say together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from scripts.compare_policies import NUM_BOOTSTRAPS, Bench, interval

NUM_BINS = 10


@dataclass(kw_only=True)
class Context:
    """A held-out text in front of both models."""

    bench: Bench
    number: int
    seed: int
    _drafters: dict[SamplingSettings, LanguageModelDrafter] = field(default_factory=dict)

    def grow(self, settings: TreeSettings, sampling: SamplingSettings) -> TokenTree:
        """The tree that the policy grows here."""
        drafter = self.drafter(settings, sampling)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.number)
        return self.bench.grow(settings, sampling, drafter, self.number, 0, generator)

    def drafter(self, settings: TreeSettings, sampling: SamplingSettings) -> LanguageModelDrafter:
        """A drafter at the text, the same one for all trees of a temperature."""
        if sampling not in self._drafters:
            self._drafters[sampling] = self.bench.drafter(settings, sampling)
        drafter = self._drafters[sampling]
        drafter.sampling = settings.draft_sampling(sampling)
        return drafter

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
    index = torch.randint(len(every), (NUM_BOOTSTRAPS, len(every)), generator=torch.Generator().manual_seed(0))
    sums = torch.stack([every[some].sum(0) for some in index])  # [bootstraps, bins, 2]
    whole = every.sum(0)
    found = []
    for bin_sum, bin_sums in zip(whole, sums.unbind(1), strict=True):
        if bin_sum[1] <= 0:
            found.append("-")
            continue
        rates = bin_sums[:, 0] / bin_sums[:, 1].clamp(min=1e-12)
        found.append(f"{bin_sum[0] / bin_sum[1]:.3f} ({rates.quantile(0.025):.3f} to {rates.quantile(0.975):.3f})")
    return found


def in_words(values: Sequence[float], digits: int = 2) -> str:
    """The mean over contexts, and its 95 % interval by bootstrap, as 'mean (low to high)'."""
    generator = torch.Generator().manual_seed(0)
    mean, low, high = interval(torch.tensor(values, dtype=torch.float64), generator)
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


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
