"""The settings in use at a step, and their known yield."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.tuning.costs import StepCosts
from edgespec.tuning.tokens_by_size import MeanTree
from edgespec.tuning.tree_limits import TreeLimits

CLEAR_GAIN = 1.15  # times as fast: a tree that may be a little faster is tried where its trial is paid for
COMPANY_GAIN = 0.1  # more for each doubling of the texts: passes were timed with other rows
OF_EACH_TEXT = 0.5  # of the seconds of growth that a draft was timed with for one text, before its first tree
READ_STEPS = 16  # that are to pay for the draft's reading of what it has not read


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The trees in use, the other sizes, and what steps with them take."""

    costs: StepCosts
    num_texts: int
    sizes: Sequence[int]
    trees: Sequence[MeanTree]  # of each size
    limits: TreeLimits  # in use, or last in use
    is_plain: bool
    gain: float = 1.0  # times the tokens a second of roots alone that steps without a draft have, by looked up text
    usual: Sequence[MeanTree] = ()  # trees of drafts as usual; none where a draft's seconds are not known
    is_tested: bool = True  # whether any tree was seen
    num_unread: int = 0  # tokens that the draft has not read
    streams: bool = False  # whether passes wait for weights

    def tree(self, size: int) -> MeanTree:
        """Return the mean tree of a size."""
        return self.trees[self.sizes.index(size)]

    @property
    def tree_in_use(self) -> MeanTree:
        """Return the mean tree of the limits in use."""
        return self.tree(self.limits.size)

    def per_s(self, tree: MeanTree) -> float:
        """Return the tokens a second of all texts with such trees."""
        return self.num_texts * tree.tokens / self.costs.of(tree, self.num_texts)

    @property
    def is_plain_timed(self) -> bool:
        """Return whether a pass of roots alone was timed, or others show what it takes."""
        return self.is_flat or self.costs.passes(self.num_texts).times_seen(self.num_texts) > 0

    @property
    def is_flat(self) -> bool:
        """Return whether passes wait for weights, and rows add little to them."""
        return self.streams and self.costs.passes(self.num_texts).is_flat

    @functools.cached_property
    def plain_per_s(self) -> float:
        """Return the tokens a second of all texts without a draft's trees."""
        return self.gain * self.num_texts / self.costs.plain_s(self.num_texts)

    @functools.cached_property
    def usual_tree(self) -> MeanTree:
        """Return the fastest of trees as usual."""
        return max(self.usual, key=self.per_s)

    @property
    def expects_trees(self) -> bool:
        """Return whether trees as usual would pay clearly; where nothing is known of them, they may."""
        if not self.usual:
            return True
        tree, growth = self.usual_tree, self.costs.growth
        seconds = self.costs.of(tree, self.num_texts) + growth.row_s * self.num_unread / READ_STEPS
        if not self.is_tested:
            # It was timed for one text, and by itself; what else runs slows it as it slows passes.
            times = OF_EACH_TEXT * (self.num_texts - 1) + self.costs.passes(self.num_texts).slowness(self.num_texts) - 1
            seconds += times * growth.seconds(tree.layers, self.num_texts * tree.nodes)
        clear = CLEAR_GAIN + COMPANY_GAIN * math.log2(max(1, self.num_texts))
        return self.num_texts * tree.tokens / seconds >= clear * self.plain_per_s

    @property
    def may_pay(self) -> bool:
        """Return whether trees could pay of which each layer is accepted: none brings more."""
        return any(
            self.per_s(MeanTree(1 + layers, layers, layers)) > self.plain_per_s for layers in (1, 2, 4, 8, 16, 32)
        )

    @property
    def per_s_in_use(self) -> float:
        """Return the tokens a second of all texts with the settings in use."""
        return self.plain_per_s if self.is_plain else self.per_s(self.tree_in_use)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step with the settings in use."""
        if self.is_plain:
            return self.costs.plain_s(self.num_texts)
        return self.costs.of(self.tree_in_use, self.num_texts)

    def lost_s(self, tree: MeanTree) -> float:
        """Return the seconds that a step with such a tree takes beyond those that its tokens take now."""
        return self.costs.of(tree, self.num_texts) - self.num_texts * tree.tokens / self.per_s_in_use

    def plain_lost_s(self) -> float:
        """Return the seconds that a plain step takes beyond those that its tokens take now."""
        return self.costs.plain_s(self.num_texts) * (1 - self.plain_per_s / self.per_s_in_use)

    def near(self, notches: int) -> Sequence[int]:
        """Return the sizes within this number of notches of the one in use."""
        index = self.sizes.index(self.limits.size)
        return self.sizes[max(0, index - notches) : index + notches + 1]
