"""What a draft's trees bring a text beside what is looked up, and what they take: learned from the steps that had one.

A text is written fastest where the draft grows in exactly those steps in which the tokens that it adds are more than
the text gains elsewhere in the seconds that it adds. Only texts that do not depend on their trees may follow a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.tuning.step import StepResult

MEMORY = 0.9  # of the means of trees, a tree
RATE_MEMORY = 0.98  # of a text's tokens and seconds, a step
SURE = 3  # trees from which their means count
HICCUP = 3.0  # times the mean that a step may count for
PROBE_SHARE = 0.02  # of the time without the draft that a tree of its may cost, to see whether it pays by now
LEAST_PROBE_SHARE = 0.002  # after many trees in a row that were not expected to pay, or far from it


@dataclass(slots=True)
class SeenTrees:
    """Sums over all trees of the draft's that were verified."""

    num_trees: int = 0
    tokens: int = 0  # that the draft had proposed
    nodes: int = 0
    layers: int = 0


class DraftWorth:
    """The draft's trees of one size, over all texts."""

    def __init__(self, reached: Sequence[float] = (), *, nodes: float = 0.0, grow_s: float = 0.0) -> None:
        """Begin with a tree as is usual, `reached` being its chances by layer, or with nothing."""
        self._num_trees = SURE if reached else 0
        self._reached = list(reached)  # the share of trees whose nodes of the draft's went 1, 2, … tokens far
        self.nodes, self.grow_s = nodes, grow_s  # of a tree: means; seconds are those of a text's share of the step
        self._tokens = self._seconds = self._steps = 0.0  # of texts, fading
        self._left_out_s = 0.0  # since the last tree
        self._num_probes = 0  # trees since one was expected to pay, it included
        self.seen = SeenTrees()

    @property
    def is_known(self) -> bool:
        """Return whether there have been trees enough for a verdict."""
        return self._num_trees >= SURE

    @property
    def per_s(self) -> float:
        """Return the tokens a second of a text, by its share of the steps; 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def gain(self, reached: Sequence[float]) -> float:
        """Return the tokens that a tree of the draft's adds to what is looked up, which has these chances by layer.

        How far both go is taken to be independent: the step goes as far as the one that goes further.
        """
        chances = [*reached, *(0.0,) * (len(self._reached) - len(reached))]
        return sum(own * (1 - min(1.0, other)) for own, other in zip(self._reached, chances, strict=False))

    def pays(self, reached: Sequence[float], added_s: float, *, first_per_s: float = 0.0) -> bool:
        """Return whether a tree that adds these seconds to a step pays, or is to show it again.

        Before a text's first step it may be expected to make `first_per_s` tokens a second.
        """
        gain = self.gain(reached)
        lost = (self.per_s or first_per_s) * added_s - gain  # tokens
        if lost <= 0:
            self._num_probes = 0
            return True
        share = LEAST_PROBE_SHARE
        if lost <= gain + 1:  # it is near to paying, and few trees may have shown less than they are worth
            share = max(share, PROBE_SHARE / max(1, self._num_probes))
        return lost <= share * self.per_s * self._left_out_s

    def learn(self, step: StepResult, *, is_drafted: bool) -> None:
        """Learn from a step of a text, which the draft had a part in or not."""
        seconds = step.total_s / step.num_texts
        if self._steps:
            seconds = min(seconds, HICCUP * self._seconds / self._steps)
        self._tokens = RATE_MEMORY * self._tokens + len(step.tokens)
        self._seconds = RATE_MEMORY * self._seconds + seconds
        self._steps = RATE_MEMORY * self._steps + 1
        if is_drafted:
            self._num_probes += self.is_known
            self._learn_tree(step)
            self._left_out_s = 0.0
        else:
            self._left_out_s += seconds

    def _learn_tree(self, step: StepResult) -> None:
        own = 0  # tokens, from the root down, that the draft had proposed
        for is_proposed, is_looked_up in zip(step.from_draft, step.from_lookup, strict=True):
            if not is_proposed or is_looked_up:
                break
            own += 1
        if step.num_drafted:
            self.seen.num_trees += 1
            self.seen.tokens += own
            self.seen.nodes += step.num_drafted
            self.seen.layers += len(step.num_by_depth)
        self._num_trees += 1
        share = max(1 - MEMORY, 1 / self._num_trees)
        self._reached += [0.0] * (own - len(self._reached))
        self._reached = [known + share * ((far < own) - known) for far, known in enumerate(self._reached)]
        self.nodes += share * (step.num_drafted - self.nodes)
        seconds = step.grow_s / step.num_texts
        if self._num_trees > 1:
            seconds = min(seconds, HICCUP * self.grow_s)
        if self._num_trees <= SURE and seconds < self.grow_s / HICCUP:
            self.grow_s = seconds  # those before it were hiccups: a first tree also loads kernels
        self.grow_s += share * (seconds - self.grow_s)
