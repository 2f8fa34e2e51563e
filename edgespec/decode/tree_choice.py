"""The tree of the next step, by what the steps so far have cost and yielded.

Tokens a second are maximal where a node is taken exactly if its expected tokens exceed lambda times the seconds that
it adds, lambda being the tokens a second of all: a least score. The same holds for a layer, which costs a draft call,
and for trees as such. The size is looked for among neighbours of the one in use, because passes are no straight
lines: a few rows more may cost nothing, or a jump.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edgespec.decode.costs import GrowthCosts, PassCosts
from edgespec.decode.promises import Promises, depths, scores_by_rank
from edgespec.decode.step import StepResult
from edgespec.decode.yields import Yield, Yields
from edgespec.tree.token_tree import TokenTree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
NOTCHES = 2  # of these in a move: twice the nodes, or half of them
CLEARLY = 1.02  # faster, for a change between trees and none
SLIGHTLY = 1.01  # for another size
FIRST_TREES = 3  # before trees are given up, unless they are hopeless
HOPELESS = 0.5  # of plain decoding's speed
LEAST_RANGE = 8.0  # nodes over which the slope of passes is taken
LIMITS_AN_OCTAVE = 4
LEAST_SCORE, MOST_SCORE = 1e-3, 0.25  # that is asked of a node; below the first, of none
LEAST_GAIN, MOST_GAIN = 1 / 16, 2.0  # of a layer
LOOK_TREES = 3  # of a look at trees while decoding plainly
LOOK_SHARE = 50  # passes for each pass that a look takes: 2 %
FIRST_LOOKS, FIRST_SHARE = 3, 5  # which come sooner, because what they may correct was decided by few steps
LOOK_AFTER = 4  # passes before the first look; each later one comes after twice as many
FIRST_WAIT, LONGEST_WAIT = 12, 1024
PROBE_AFTER, PROBE_WAIT = 16, 256  # steps before a plain pass or a larger tree is tried, at first and at most
PROBE_LESS = 4.0  # is asked of a node in a larger tree that is tried


@dataclass(frozen=True, slots=True)
class Wanted:
    """The limits of a step's tree."""

    size: int
    threshold: float = 0.0
    stop_gain: float = 0.0


@dataclass(slots=True)
class StepCosts:
    """What passes and draft calls take, whatever the text and its sampling."""

    passes: PassCosts = field(default_factory=PassCosts)
    growth: GrowthCosts = field(default_factory=GrowthCosts)

    def of(self, tree: Yield) -> float:
        """Return the seconds of a step with such trees."""
        return self.passes.seconds(1 + tree.nodes) + self.growth.seconds(tree.layers, tree.nodes)

    @property
    def plain_s(self) -> float:
        """Return the seconds of a step without a tree."""
        return self.passes.seconds(1)


@dataclass(frozen=True, slots=True)
class _Grown:
    """The tree of the step under way."""

    scores: list[float]  # of the nodes below the root
    layers: list[int]
    limit: int
    is_typical: bool  # no tree that ends with its text


class TreeChoice:
    """What has been learned of one way of sampling, and the tree that follows from it."""

    def __init__(self, costs: StepCosts, sizes: Sequence[int], *, start: Wanted) -> None:
        self.costs, self.yields, self.promises = costs, Yields(sizes), Promises()
        self.wanted = start  # in use, or last in use
        self.last = start  # of the last tree, which may have been a trial
        self.is_plain = False
        self._continuation = 0.7  # a layer's expected tokens over those of the one before
        self._grown: _Grown | None = None
        self._least_score, self._least_gain = start.threshold, start.stop_gain  # in the last tree
        self._was_plain = False  # the step before this one
        self._trees_left, self._look_trees = 0, LOOK_TREES  # of a look
        self._num_looks, self._until_look = 0, 0
        self._plain_wait = self._more_wait = PROBE_AFTER
        self._until_plain, self._until_more = PROBE_AFTER, PROBE_AFTER

    def begin_text(self) -> None:
        """Let what the last text yielded count for less: the next one may be of another kind."""
        self.yields.forget(0.5)
        self._was_plain = False

    def next(self) -> Wanted | None:
        """Return the limits of the next tree; None is for a step without one."""
        self._grown = None
        if self.is_plain:
            if self._trees_left == 0:
                self._until_look -= 1
                if self._until_look > 0:
                    return None
                self._trees_left = self._look_trees
                self.yields.forget(0.8)  # of trees with other limits
            self._trees_left -= 1
            return self.wanted
        if self.yields.num_trees and not self.costs.passes.times_seen(1):
            return None
        self._until_plain -= 1
        self._until_more -= 1
        if self._until_plain <= 0:
            self._plain_wait = self._until_plain = min(PROBE_WAIT, 2 * self._plain_wait)
            return None
        if self._until_more <= 0:
            self._more_wait = self._until_more = min(PROBE_WAIT, 2 * self._more_wait)
            threshold = self.wanted.threshold / PROBE_LESS
            return Wanted(self._near(self.wanted.size)[-1], threshold, self.wanted.stop_gain)
        return self.wanted

    def expect(self, tree: TokenTree, wanted: Wanted, max_depth: int) -> None:
        """Note what a tree promises before it is verified; the text had room for `max_depth` layers."""
        parents = tree.parents.tolist()
        scores = scores_by_rank(parents, tree.ranks.tolist()) if tree.scores is None else tree.scores.tolist()
        layers = depths(parents)
        self.last = wanted
        self._grown = _Grown(scores[1:], layers[1:], wanted.size, is_typical=layers[-1] < max_depth)

    def learn(self, step: StepResult) -> None:
        """Learn from a step, and choose the tree of the next one."""
        self.costs.passes.observe(1 + step.num_drafted, step.target_s + step.rest_s)
        grown = self._grown
        if grown is None:
            self._was_plain = True
            if self.is_plain:
                return
        else:
            self._learn_tree(grown, step)
            self._was_plain = False
        if not self.is_plain or self._trees_left == 0:
            self._choose()

    def in_words(self) -> str | None:
        """Say what trees are in use, and why; None before anything is known."""
        if not self.yields.num_trees:
            return None
        tree, costs = self._now(), self.costs
        if self.is_plain:
            times = costs.of(tree) / costs.plain_s
            return f"no trees (tuned): {tree.tokens:.1f} tokens of {tree.nodes:.0f} nodes take {times:.1f} plain passes"
        return f"trees of {tree.nodes:.0f} nodes (tuned): {tree.tokens:.1f} tokens a pass in {_time(costs.of(tree))}"

    def _now(self) -> Yield:
        return self.yields.all()[self.yields.sizes.index(self.wanted.size)]

    def _learn_tree(self, grown: _Grown, step: StepResult) -> None:
        accepted = [False] * len(grown.scores)
        for node in step.path:
            accepted[node - 1] = True
        self.promises.learn(grown.scores, accepted)
        num_layers = max(grown.layers, default=1)  # a call finds out that no node is worth it
        growth, num_nodes = self.costs.growth, len(grown.scores)
        # Behind a plain step the draft reads the text of all of them as well: only less than expected says something.
        if not self._was_plain or step.grow_s < growth.seconds(num_layers, num_nodes):
            growth.observe(num_layers, num_nodes, step.grow_s)
        if not grown.is_typical:
            return
        expected = self.promises.expected(grown.scores)
        order = sorted(range(len(expected)), key=grown.scores.__getitem__, reverse=True)
        self.yields.learn([expected[n] for n in order], [grown.layers[n] for n in order], grown.limit)
        by_layer = [0.0] * (num_layers + 1)
        for layer, tokens in zip(grown.layers, expected, strict=True):
            by_layer[layer] += tokens
        self._least_score, self._least_gain = min(grown.scores, default=0.0), min(by_layer[1:])
        if num_layers > 1:
            ratio = sum(by_layer[2:]) / max(1e-9, sum(by_layer[:-1]))
            self._continuation += (min(1.0, max(0.3, ratio)) - self._continuation) / 16

    def _choose(self) -> None:
        yields = dict(zip(self.yields.sizes, self.yields.all(), strict=True))
        per_s = {size: found.tokens / self.costs.of(found) for size, found in yields.items()}
        plain_per_s = 1 / self.costs.plain_s
        near = self._near(self.wanted.size)
        is_early = self.yields.num_trees < FIRST_TREES and per_s[self.wanted.size] > HOPELESS * plain_per_s
        if is_early:
            near = [size for size in near if size >= self.wanted.size]
        best = max(near, key=per_s.__getitem__)
        if per_s[best] < SLIGHTLY * per_s[self.wanted.size]:
            best = self.wanted.size
        was_plain = self.is_plain
        if was_plain:
            self.is_plain = per_s[best] < CLEARLY * plain_per_s
        elif self.costs.passes.times_seen(1):
            self.is_plain = not is_early and plain_per_s > CLEARLY * per_s[best]
        if self.is_plain:
            self._num_looks = self._num_looks + 1 if was_plain else 0
            self._look_trees = LOOK_TREES if per_s[best] > HOPELESS * plain_per_s else 1
            self._until_look = self._wait_for_look(yields[best])
        elif was_plain:
            self._num_looks = 0
        self.wanted = replace(self.wanted, size=best)
        if not is_early:
            if self.wanted.stop_gain == self.wanted.threshold == 0:
                self.yields.forget(0.8)  # which had no limits
            self._use(yields[best], max(per_s[best], plain_per_s))

    def _wait_for_look(self, tree: Yield) -> int:
        """Return the passes until the next look at trees: so many that looking costs little."""
        wait = LOOK_AFTER << min(self._num_looks, 8)
        lost_s = self.costs.of(tree) - tree.tokens * self.costs.plain_s + self.costs.growth.seconds(1, 0)
        share, most = (FIRST_SHARE, FIRST_WAIT) if self._num_looks < FIRST_LOOKS else (LOOK_SHARE, LONGEST_WAIT)
        return min(most, max(wait, int(share * self._look_trees * lost_s / self.costs.plain_s)))

    def _use(self, tree: Yield, per_s: float) -> None:
        """Ask of a node and of a layer what the seconds that they add would bring elsewhere."""
        # Passes are looked at over a wide range: between two neighbours, noise would be the slope.
        few, many = 0.5 * tree.nodes, max(LEAST_RANGE, 1.5 * tree.nodes)
        node_s = (self.costs.passes.seconds(1 + many) - self.costs.passes.seconds(1 + few)) / (many - few)
        node_tokens = per_s * (max(0.0, node_s) + self.costs.growth.seconds(0, 1))
        layer_tokens = per_s * self.costs.growth.seconds(1, 0) / self._continuation
        self.wanted = Wanted(
            self.wanted.size,
            _moved(
                self.wanted.threshold, self._least_score, self.promises.score_of(node_tokens), LEAST_SCORE, MOST_SCORE
            ),
            _moved(
                self.wanted.stop_gain, self._least_gain, self.promises.score_of(layer_tokens), LEAST_GAIN, MOST_GAIN
            ),
        )

    def _near(self, size: int) -> Sequence[int]:
        """Return the sizes that a step may move to."""
        sizes = self.yields.sizes
        index = sizes.index(size)
        return sizes[max(0, index - NOTCHES) : index + NOTCHES + 1]


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def _moved(now: float, met: float, wanted: float, least: float, most: float) -> float:
    """Return a limit nearer to the one wanted, by a factor of two at most; below `least` there is none.

    The last tree may have met a higher limit than the one that there is `now`.
    """
    low, high = now / 2, max(now, met, least) * 2
    found = min(max(wanted, low), high, most)
    # Few different limits: the settings of each are made once.
    return 0.0 if found < least else 2 ** (round(LIMITS_AN_OCTAVE * math.log2(found)) / LIMITS_AN_OCTAVE)
