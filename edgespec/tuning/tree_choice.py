"""The tree of the next step, by what the steps so far have cost and yielded.

Tokens a second are maximal where a node is taken exactly if its expected tokens exceed lambda times the seconds that
it adds, lambda being the tokens a second of all: a least score. The same holds for a layer, which costs a draft call,
and for trees as such. The size is looked for among neighbours of the one in use, because passes are no straight
lines: a few rows more may cost nothing, or a jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.calibration import GrownTree, ScoreCalibration, depths, scores_by_rank
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.far_trial import FarTrial
from edgespec.tuning.plain_probe import PlainProbe
from edgespec.tuning.step import PassCost, StepResult
from edgespec.tuning.tokens_by_size import MeanTree, TokensBySize
from edgespec.tuning.tree_limits import TreeLimits

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
NOTCHES = 2  # of these in a move: twice the nodes, or half of them
CLEARLY = 1.02  # faster, for a change between trees and none
SLIGHTLY = 1.01  # for another size
FIRST_TREES = 3  # before trees are given up, unless they are hopeless
HOPELESS = 0.5  # of plain decoding's speed
MIN_RANGE = 8.0  # nodes over which the slope of passes is taken
LOOK_TREES = 3  # of a look at trees while decoding plainly
LOOK_SHARE = 50  # passes for each pass that a look takes: 2 %
FIRST_LOOKS, FIRST_SHARE = 3, 5  # which come sooner, because what they may correct was decided by few steps
LOOK_AFTER = 4  # passes before the first look; each later one comes after twice as many
FIRST_WAIT, LONGEST_WAIT = 12, 1024
MORE_AFTER, MORE_WAIT = 16, 256  # steps before a larger tree is tried, at first and at most
MORE_ASKS = 4.0  # times less of a node


class TreeChoice:
    """What has been learned of one way of sampling, and the tree that follows from it."""

    def __init__(
        self, costs: StepCosts, sizes: Sequence[int], *, start: TreeLimits, shares_budget: bool = False
    ) -> None:
        """Begin with the limits `start`; where trees share a budget, a size is the mean of theirs."""
        self._shares_budget = shares_budget
        self._grown: list[GrownTree] = []  # by the texts of the last step
        self.costs, self.yields, self.promises = costs, TokensBySize(sizes), ScoreCalibration()
        self.wanted = start  # in use, or last in use
        self.last = start  # of the last tree, which may have been a trial
        self.is_plain = False
        self._continuation = 0.7  # a layer's expected tokens over those of the one before
        self._least_score, self._least_gain = start.threshold, start.stop_gain  # in the last tree
        self.in_step: TreeLimits | None = start  # the trees of the step under way; None: no trees
        self.places: list[TreeLimits | None] = []  # that the next steps visit first, to learn what they cost and yield
        self._step, self._num_texts = -1, 1
        self._has_learned = False
        self._trees_left, self._look_trees = 0, LOOK_TREES  # of a look
        self._num_looks, self._until_look = 0, 0
        self._plain_probe = PlainProbe()
        self._until_more = self._more_wait = MORE_AFTER
        self._trial, self._is_far_next = FarTrial(), True

    def begin_text(self) -> None:
        """Let what the last text yielded count for less: the next one may be of another kind."""
        self.yields.forget(0.5 / self._num_texts)

    def begin_step(self, number: int, num_texts: int) -> None:
        """Choose the trees of the step of that number, of so many texts under way."""
        if number == self._step:
            return
        self._step, self._num_texts = number, num_texts
        if self._has_learned:
            self._has_learned = False
            self._learn_yields()
            if not self.is_plain or self._trees_left == 0 or self._is_trial_hopeless():
                self._choose()
        self.in_step = self.places.pop(0) if self.places else self._next()

    def _next(self) -> TreeLimits | None:
        """Return the limits of the next trees; None is for a step without them."""
        if self.is_plain:
            if self._trees_left == 0:
                self._until_look -= 1
                if self._until_look > 0:
                    return None
                self._trees_left = self._look_trees
                self.yields.forget(0.8)  # of trees with other limits
                self._begin_trial()
            self._trees_left -= 1
            return self._wanted_of_trial() or self.wanted
        if self.yields.num_trees and self._may_be_faster_plain():
            return None
        if self._trial.size is not None:
            return self._wanted_of_trial()
        if self._is_plain_probed():
            return None
        self._until_more -= 1
        if self._until_more <= 0:
            self._more_wait = self._until_more = min(MORE_WAIT, 2 * self._more_wait)
            trial = self._begin_trial()
            if trial is not None:
                return trial
            threshold = self.wanted.threshold / MORE_ASKS
            return TreeLimits(self._near(self.wanted.size)[-1], threshold, self.wanted.stop_gain)
        return self.wanted

    def _may_be_faster_plain(self) -> bool:
        """Return whether no plain pass of so many texts was timed, and others leave open whether one would be faster.

        Where passes are slow, one for every number of texts would cost more than it tells.
        """
        if self.costs.passes(self._num_texts).times_seen(self._num_texts):
            return False
        tree = self._now()
        return tree.tokens * self.costs.least_plain_s(self._num_texts) < self.costs.of(tree, self._num_texts)

    def _is_plain_probed(self) -> bool:
        if not self.yields.num_trees:
            return False
        tree = self._now()
        return self._plain_probe.is_next(self._plain_per_s() / self._per_s(tree), tree.tokens)

    def _begin_trial(self) -> TreeLimits | None:
        """Begin a trial of far larger trees, if there are any to try, every second time that something is looked at."""
        self._is_far_next = not self._is_far_next
        if self._is_far_next:
            return None
        num_texts, layers = self._num_texts, 2 * self._now().layers

        def step_s(size: int) -> float:
            nodes = num_texts * size
            return self.costs.passes(num_texts).seconds(num_texts + nodes) + self.costs.growth.seconds(layers, nodes)

        self._trial.begin(self.yields.sizes, self._near(self.wanted.size)[-1], step_s)
        return self._wanted_of_trial()

    def _is_trial_hopeless(self) -> bool:
        """Return whether the first trees of a trial are so slow that more of them would only cost time."""
        tried = self._trial.found(self.yields.sizes)
        if tried is None:
            return False
        return self._per_s(tried[1]) < HOPELESS * max(self._plain_per_s(), self._per_s(self._now()))

    def _wanted_of_trial(self) -> TreeLimits | None:
        return None if self._trial.size is None else TreeLimits(self._trial.size)

    def expect(self, tree: TokenTree, wanted: TreeLimits, max_depth: int) -> GrownTree:
        """Return what a tree promises before it is verified; the text had room for `max_depth` layers."""
        parents = tree.parents.tolist()
        scores = scores_by_rank(parents, tree.ranks.tolist()) if tree.scores is None else tree.scores.tolist()
        layers = depths(parents)
        self.last = wanted
        return GrownTree(scores[1:], layers[1:], wanted.size, is_typical=layers[-1] < max_depth)

    def observe(self, cost: PassCost) -> None:
        """Learn what a step of all texts took."""
        self.costs.observe(cost)
        if self.in_step is None:
            return
        growth, num_nodes = self.costs.growth, cost.num_rows - cost.num_texts
        num_layers = max(1, cost.num_layers)  # a call finds out that no node is worth it
        # Where the draft had to read text as well, only less than expected says something.
        if cost.num_pending <= cost.num_texts or cost.grow_s < growth.seconds(num_layers, num_nodes):
            growth.observe(num_layers, num_nodes, cost.grow_s)

    def learn(self, step: StepResult, grown: GrownTree | None) -> None:
        """Learn what a text's tree yielded, if it had one; the next step chooses by it."""
        if grown is not None:
            self._learn_tree(grown, step)
        self._has_learned = self._has_learned or grown is not None or not self.is_plain

    def in_words(self) -> str | None:
        """Say what trees are in use, and why; None before anything is known."""
        if not self.yields.num_trees:
            return None
        tree, costs = self._now(), self.costs
        if self.is_plain:
            times = costs.of(tree, self._num_texts) / costs.plain_s(self._num_texts)
            return f"no trees (tuned): {tree.tokens:.1f} tokens of {tree.nodes:.0f} nodes take {times:.1f} plain passes"
        seconds = costs.of(tree, self._num_texts)
        nodes = f"{tree.nodes:.0f} node" + "s" * (round(tree.nodes) != 1)
        return f"trees of {nodes} (tuned): {tree.tokens:.1f} tokens a pass in {_time(seconds)}"

    def _now(self) -> MeanTree:
        return self.yields.all()[self.yields.sizes.index(self.wanted.size)]

    def _learn_tree(self, grown: GrownTree, step: StepResult) -> None:
        accepted = [False] * len(grown.scores)
        for node in step.path:
            accepted[node - 1] = True
        self.promises.learn(grown.scores, accepted)
        self._grown.append(grown)

    def _learn_yields(self) -> None:
        """Learn what the trees of the last step were expected to yield: together, where they shared a budget."""
        trees, self._grown = self._grown, []
        for together in [trees] if self._shares_budget else [[tree] for tree in trees]:
            if any(tree.limit == self._trial.size for tree in together):
                self._trial.learn(*self.promises.best_first(together), len(together))
            typical = [tree for tree in together if tree.is_typical]
            if typical:
                self._learn_together(typical)

    def _learn_together(self, trees: Sequence[GrownTree]) -> None:
        expected, layers = self.promises.best_first(trees)
        self.yields.learn(expected, layers, trees[0].limit, len(trees))
        num_layers = max(layers, default=1)  # a call finds out that no node is worth it
        by_layer = [0.0] * (num_layers + 1)
        for layer, tokens in zip(layers, expected, strict=True):
            by_layer[layer] += tokens / len(trees)
        self._least_score = min((score for tree in trees for score in tree.scores), default=0.0)
        self._least_gain = min(by_layer[1:])
        if num_layers > 1:
            ratio = sum(by_layer[2:]) / max(1e-9, sum(by_layer[:-1]))
            self._continuation += (min(1.0, max(0.3, ratio)) - self._continuation) / 16

    def _per_s(self, tree: MeanTree) -> float:
        """Return the tokens a second of all texts with such trees."""
        return self._num_texts * tree.tokens / self.costs.of(tree, self._num_texts)

    def _plain_per_s(self) -> float:
        return self._num_texts / self.costs.plain_s(self._num_texts)

    def _choose(self) -> None:
        yields = dict(zip(self.yields.sizes, self.yields.all(), strict=True))
        num_texts = self._num_texts
        per_s, plain_per_s = {size: self._per_s(found) for size, found in yields.items()}, self._plain_per_s()
        tried = self._trial.found(self.yields.sizes)
        if tried is not None and (self.is_plain or self._trial.is_done or self._is_trial_hopeless()):
            size, self._trial, self._trees_left = self._trial.size, FarTrial(), 0
            if size is not None and self._per_s(tried[1]) > CLEARLY * max(plain_per_s, per_s[self.wanted.size]):
                self.yields, self.wanted, self.is_plain, self._num_looks = tried[0], TreeLimits(size), False, 0
                return
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
        elif self.costs.passes(num_texts).times_seen(num_texts):
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

    def _wait_for_look(self, tree: MeanTree) -> int:
        """Return the passes until the next look at trees: so many that looking costs little."""
        wait = LOOK_AFTER << min(self._num_looks, 8)
        plain_s = self.costs.plain_s(self._num_texts)
        lost_s = self.costs.of(tree, self._num_texts) - tree.tokens * plain_s + self.costs.growth.seconds(1, 0)
        share, most = (FIRST_SHARE, FIRST_WAIT) if self._num_looks < FIRST_LOOKS else (LOOK_SHARE, LONGEST_WAIT)
        return min(most, max(wait, int(share * self._look_trees * lost_s / plain_s)))

    def _use(self, tree: MeanTree, per_s: float) -> None:
        """Ask of a node and of a layer what the seconds that they add would bring elsewhere."""
        # Passes are looked at over a wide range: between two neighbours, noise would be the slope.
        num_texts = self._num_texts
        nodes = num_texts * tree.nodes
        few, many = 0.5 * nodes, max(MIN_RANGE, 1.5 * nodes)
        passes = self.costs.passes(num_texts)
        node_s = (passes.seconds(num_texts + many) - passes.seconds(num_texts + few)) / (many - few)
        node_tokens = per_s * (max(0.0, node_s) + self.costs.growth.seconds(0, 1))
        # A layer is one draft call for all texts.
        layer_tokens = per_s * self.costs.growth.seconds(1, 0) / num_texts / self._continuation
        self.wanted = self.wanted.asking(
            self.promises.score_of(node_tokens),
            self.promises.score_of(layer_tokens),
            met=(self._least_score, self._least_gain),
        )

    def _near(self, size: int) -> Sequence[int]:
        """Return the sizes that a step may move to."""
        sizes = self.yields.sizes
        index = sizes.index(size)
        return sizes[max(0, index - NOTCHES) : index + NOTCHES + 1]


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
