"""Which nodes of looked up text pay, and when they are enough without the draft.

Only texts that do not depend on their trees have looked up nodes, so that seconds may decide. What follows the end of a
text is sure at one step and unknown at the next, and chances say which: the choice is made for each step by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from edgespec.draft.lookup import Corpus, LookedUp, TextLookup
from edgespec.grow import Growth
from edgespec.grow.merged import Merged
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import TokenTree, root_only
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.step import PassCost, StepResult

LEAST_CHANCE = 0.05  # of a node: below, it costs more to find than it brings
STEP = 4  # nodes between two numbers of them that are compared
MEMORY = 0.9  # of the draft's means, a step
RESCUED = 0.5  # of the draft's tokens, where the text goes another way than what was looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSource:
    """What the texts of an engine have in common."""

    corpus: Corpus | None = None  # that they are continued by, beside themselves
    costs: StepCosts = field(default_factory=StepCosts)  # of passes, where no tuner knows them


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """The nodes that a text's trees may have."""

    most: int  # below the root
    is_tuned: bool  # whether they are as many as pay; otherwise as many as may be
    draw: Draw
    device: torch.device


class LookupChoice:
    """The looked up nodes of one text's trees."""

    def __init__(self, lookup: TextLookup, costs: StepCosts, limits: LookupLimits) -> None:
        self.lookup, self._costs, self._limits = lookup, costs, limits
        self._num_texts = 1
        self._draft_tokens: float | None = None  # that the draft's nodes bring a step, and the seconds of its growth
        self._draft_s = 0.0
        self._draft_nodes = 0.0  # of a tree that it grew
        self.has_draft = False  # whether the draft grows in this step
        self.is_left_out: Callable[[], bool] = lambda: False  # in this step, which another tuning looks at

    def growth(self, drafted: Growth, root: int, depth: int) -> Growth:
        """Return the growth of a tree with what was looked up, without the draft's where that does not pay."""
        assert not isinstance(drafted, Merged)
        limits = self._limits
        if self.is_left_out():
            self.has_draft = False
            return drafted
        looked_up = self.lookup.candidates(limits.most, depth=depth, least=LEAST_CHANCE)
        self.has_draft = not isinstance(drafted, TokenTree)
        if self.has_draft and self._is_enough(looked_up):
            drafted = root_only(root, draw=limits.draw, device=limits.device)
            self.has_draft = False
        if not looked_up:
            return drafted
        return Merged(drafted=drafted, looked_up=looked_up, num_to_take=self._num_to_take)

    def learn(self, step: StepResult) -> None:
        """Learn what the draft brought in a step."""
        self._num_texts = step.num_texts
        if not self.has_draft:
            return
        tokens = 0
        for is_proposed, is_looked_up in zip(step.from_draft, step.from_lookup, strict=True):
            if not is_proposed or is_looked_up:
                break
            tokens += 1
        seconds = step.grow_s / step.num_texts
        if self._draft_tokens is None:
            self._draft_tokens, self._draft_s, self._draft_nodes = tokens, seconds, step.num_drafted
        self._draft_nodes += (1 - MEMORY) * (step.num_drafted - self._draft_nodes)
        self._draft_tokens += (1 - MEMORY) * (tokens - self._draft_tokens)
        # A hiccup is no verdict on the draft.
        self._draft_s += (1 - MEMORY) * (min(seconds, 2 * self._draft_s) - self._draft_s)

    def observe(self, cost: PassCost) -> None:
        """Learn what a step of all texts took, where no other tuning does."""
        self._costs.observe(cost)

    def _is_enough(self, looked_up: Sequence[LookedUp]) -> bool:
        """Return whether the text gets on faster by what was looked up alone."""
        passes, num_texts = self._costs.passes(self._num_texts), self._num_texts
        if not looked_up or self._draft_tokens is None:
            return False
        chances = [found.chance for found in looked_up]
        num_nodes = self._num_to_take(chances, 0)
        tokens = sum(chances[:num_nodes])
        fails = 1 - max(found.chance * (found.layer == _deepest(looked_up[:num_nodes])) for found in looked_up)
        beside = max(self._draft_tokens, tokens + RESCUED * fails * self._draft_tokens)
        alone_s = passes.seconds(num_texts + num_nodes) / num_texts
        if alone_s == 0:
            return False
        # The draft's nodes are rows of the pass as well.
        beside_s = passes.seconds(num_texts + max(num_nodes, round(self._draft_nodes))) / num_texts + self._draft_s
        return (1 + tokens) * beside_s >= (1 + beside) * alone_s

    def _num_to_take(self, chances: Sequence[float], num_drafted: int) -> int:
        """Return how many of a tree's nodes, best first, are most tokens a second; at least as many as the draft has.

        The other texts are taken to have their roots alone: most have nothing to look up at the same time.
        """
        most = min(len(chances), self._limits.most)
        if not self._limits.is_tuned:
            return most
        passes, num_texts = self._costs.passes(self._num_texts), self._num_texts
        beside_s = num_texts * self._draft_s if num_drafted else 0.0
        best, best_per_s, tokens = 0, 0.0, float(num_texts)
        for count in range(most + 1):
            if count:
                tokens += chances[count - 1]
            if count < STEP or count % STEP == 0 or count == most:
                seconds = passes.seconds(num_texts + count) + beside_s
                per_s = tokens / seconds if seconds else tokens
                if per_s > best_per_s:
                    best, best_per_s = count, per_s
        return max(best, min(num_drafted, most))


def _deepest(looked_up: Sequence[LookedUp]) -> int:
    return max((found.layer for found in looked_up), default=0)
