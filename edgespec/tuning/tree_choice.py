"""The tree of the next step, by what the steps so far have cost and yielded.

Tokens a second are maximal where a node is taken exactly if its expected tokens exceed lambda times the seconds that
it adds, lambda being the tokens a second of all: a least score. The same holds for a layer, which may cost a draft
call, and for trees as such. The size is chosen among neighbours of the one in use, because passes are no straight
lines: a few rows more may cost nothing, or a jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.grow.merged import scores_by_rank
from edgespec.tree.token_tree import TokenTree, depths_on_host
from edgespec.tuning.calibration import GrownTree, ScoreCalibration
from edgespec.tuning.costs import SURE, StepCosts
from edgespec.tuning.margins import Margins
from edgespec.tuning.probes import ProbeSchedule
from edgespec.tuning.settings import TuningSettings
from edgespec.tuning.situation import Situation
from edgespec.tuning.step import PassCost, StepResult, steps_since
from edgespec.tuning.tokens_by_size import MeanTree, TokensBySize
from edgespec.tuning.tree_limits import TreeLimits

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
PROMPT_ROWS = 128  # whose pass takes about as long as any while weights stream
NEW_TEXT = 0.5  # is forgotten of the yields, by a text
LONG_S = 0.05  # of a pass that other programs hardly make longer
FIRST_STEPS = 4  # that are all asked about, before the first tree
NEW_LIMITS = 0.8  # is forgotten of the yields of trees with other limits


class TreeChoice:
    """What has been learned of one way of sampling, and the tree that follows from it."""

    def __init__(
        self,
        costs: StepCosts,
        sizes: Sequence[int],
        *,
        start: TreeLimits,
        shares_budget: bool = False,
        tuning: TuningSettings | None = None,
        usual: Sequence[MeanTree] = (),
        streams: bool = False,
    ) -> None:
        """Begin with the limits `start`; where trees share a budget, a size is the mean of theirs.

        With `usual` trees none is grown before the sums say that it may pay. Passes that wait for weights that stream
        take as long as the prompt's; others are first timed by a step of roots.
        """
        self._usual, self._streams = usual, streams
        self._tuning, self._shares_budget = tuning or TuningSettings(), shares_budget
        self.costs, self.yields, self.calibration = costs, TokensBySize(sizes), ScoreCalibration()
        self.limits = start  # in use, or last in use
        self.last = start  # of the last tree, which may have been a probe's
        self.is_plain = False
        self.in_step: TreeLimits | None = start  # the trees of the running step; None: no trees
        self.places: list[TreeLimits | None] = []  # that the next steps visit first, to learn what they cost and yield
        self._grown: list[GrownTree] = []  # by the texts of the last step
        self._margins, self._probes = Margins(start), ProbeSchedule(self._tuning)
        self._step: int | None = None
        self._num_texts, self._num_unread = 1, 0
        self._has_learned = False
        self._untried_steps = 0  # before the first tree

    def begin_text(self) -> None:
        """Let what the last text yielded count for less: the next one may be of another kind."""
        self.yields.forget(NEW_TEXT / self._num_texts)

    @property
    def is_idle(self) -> bool:
        """Return whether decoding is plain, no trees are tried, and no first ones are about to be."""
        is_settled = self.yields.num_trees > 0 or self._untried_steps >= FIRST_STEPS
        return is_settled and self.is_plain and self.in_step is None and not self.places

    def begin_step(self, number: int, num_texts: int, num_unread: int = 0) -> None:
        """Choose the trees of the step with this number, for the given number of running texts.

        The draft has not read `num_unread` of their tokens.
        """
        if number == self._step:
            return
        if num_texts.bit_length() != self._num_texts.bit_length():
            self._untried_steps = 0
        num_steps = steps_since(self._step, number)
        self._probes.went_by(num_steps - 1)
        self._step, self._num_texts, self._num_unread = number, num_texts, num_unread
        if not self.yields.num_trees and self._usual and self._probes.under_way is None:
            self._look(num_steps)
        if self._has_learned:
            self._has_learned = False
            self._learn_yields()
            now = self._now()
            is_over = self._probes.is_over(now)
            if not (is_over and self._takes_trees_of_probe(now)) and (is_over or not self.is_plain):
                self._choose(now)
        self.in_step = self.places.pop(0) if self.places else self._next()

    def _next(self) -> TreeLimits | None:
        """Return the limits of the next trees; None is for a step without them."""
        in_use = None if self.is_plain else self.limits
        if not self.yields.num_trees and not (self.is_plain and self._usual and self.costs.passes(1).is_known):
            return in_use
        if self.is_plain and self._probes.passes_by():
            return None
        before = self._probes.under_way
        probe = self._probes.next(self._now())
        if probe is None:
            return in_use
        if self.is_plain and probe is not before:
            self.yields.forget(NEW_LIMITS)
        return probe.limits

    def _now(self) -> Situation:
        # A draft that is not tried yet is weighed against all steps: few of them do not show what is left to it.
        gain = self.costs.gain_left if self.yields.num_trees else self.costs.gain
        return Situation(
            costs=self.costs,
            num_texts=self._num_texts,
            sizes=self.yields.sizes,
            trees=self.yields.all(),
            limits=self.limits,
            is_plain=self.is_plain,
            gain=gain.of(self._num_texts),
            usual=self._usual,
            is_tested=self.yields.num_trees > 0,
            num_unread=self._num_unread,
            streams=self._streams,
        )

    def _look(self, num_steps: int) -> None:
        """Before the first tree, see whether trees as usual would pay; ever more seldom, for it takes a while."""
        before = self._untried_steps
        self._untried_steps += num_steps
        if before.bit_length() == self._untried_steps.bit_length():
            return
        passes, num_texts = self.costs.passes(self._num_texts), self._num_texts
        least = SURE if passes.seconds(num_texts) < LONG_S else 1  # times: of short ones one may be a hiccup
        is_timed = passes.times_seen(num_texts) >= least and len(passes.points()) > 1  # of one, rows would seem free
        # The pass over a long prompt takes longer than one that waits for weights alone.
        if not (is_timed or (self._streams and passes.is_timed_within(PROMPT_ROWS))):
            self.is_plain = True
            return
        now = self._now()
        self.is_plain, self.limits = not now.expects_trees, self._margins.first(now)

    def expect(self, tree: TokenTree, limits: TreeLimits, max_depth: int) -> GrownTree:
        """Return a tree's scores before it is verified; the text allowed `max_depth` layers."""
        parents = tree.parents.tolist()
        scores = scores_by_rank(parents, tree.ranks.tolist()) if tree.scores is None else tree.scores.tolist()
        layers = depths_on_host(parents)
        if tree.looked_up is not None:  # without a draft call
            layers = [0 if is_looked_up else layer for layer, is_looked_up in zip(layers, tree.looked_up, strict=True)]
        self.last = limits
        return GrownTree(scores[1:], layers[1:], limits.size, is_typical=max(layers) < max_depth)

    def observe(self, cost: PassCost) -> None:
        """Learn what a step of all texts took."""
        self.costs.observe(cost)
        if self.in_step is None or cost.num_layers is None:
            return
        growth, num_nodes = self.costs.growth, cost.num_drafted
        num_layers = max(1, cost.num_layers)  # a call finds out that no node is worth it
        expected_s = growth.seconds(num_layers, num_nodes)
        if cost.num_unread and growth.is_known:
            growth.observe_read(cost.num_unread, cost.grow_s - expected_s)
        # Where the draft had to read more than the last step's tokens, only less than expected says something.
        if not cost.num_unread or cost.grow_s < expected_s:
            growth.observe(num_layers, num_nodes, cost.grow_s)

    def learn(self, step: StepResult, grown: GrownTree | None) -> None:
        """Learn what a text's tree yielded, if it had one; the next step chooses by it."""
        if grown is not None:
            accepted = [False] * len(grown.scores)
            for node in step.path:
                accepted[node - 1] = True
            self.calibration.learn(grown.scores, accepted)
            self._grown.append(grown)
        self._has_learned = self._has_learned or grown is not None or (self.yields.num_trees > 0 and not self.is_plain)

    def in_words(self) -> str | None:
        """Say what trees are in use, and why; None before anything is known."""
        if not self.yields.num_trees and not (self._untried_steps and self.is_plain):
            return None
        now = self._now()
        if not now.is_tested:
            times = now.costs.of(now.usual_tree, now.num_texts) / now.costs.plain_s(now.num_texts)
            return f"no trees (tuned): {now.usual_tree.tokens:.1f} tokens as usual would take {times:.1f} plain passes"
        tree, seconds = now.tree_in_use, now.costs.of(now.tree_in_use, now.num_texts)
        if self.is_plain:
            times = seconds / now.costs.plain_s(now.num_texts)
            return f"no trees (tuned): {tree.tokens:.1f} tokens of {tree.nodes:.0f} nodes take {times:.1f} plain passes"
        nodes = f"{tree.nodes:.0f} node" + "s" * (round(tree.nodes) != 1)
        return f"trees of {nodes} (tuned): {tree.tokens:.1f} tokens a pass in {_time(seconds)}"

    def _learn_yields(self) -> None:
        """Learn what the trees of the last step were expected to yield: together, where they shared a budget."""
        trees, self._grown = self._grown, []
        for group in [trees] if self._shares_budget else [[tree] for tree in trees]:
            if group:
                self._probes.learn(*self.calibration.best_first(group), group[0].limit, len(group))
            typical = [tree for tree in group if tree.is_typical]
            if typical:
                expected, layers = self.calibration.best_first(typical)
                self.yields.learn(expected, layers, typical[0].limit, len(typical))
                self._margins.learn(expected, layers, typical)

    def _takes_trees_of_probe(self, now: Situation) -> bool:
        """Use the trees of a probe that is over, if they alone have shown that they are better."""
        tree, found, probe = self._probes.tree_apart(), self._probes.found, self._probes.under_way
        if tree is None or found is None or probe is None or probe.limits is None:
            return False
        if now.per_s(tree) <= self._tuning.min_change * max(now.plain_per_s, now.per_s(now.tree_in_use)):
            return False
        self.yields, self.limits, self.is_plain = found, probe.limits, False
        self._probes.restart()
        return True

    def _choose(self, now: Situation) -> None:
        """Choose between sizes, and between trees and none, and then the least score and gain."""
        is_early = self._is_early(now)
        best = self._best_size(now, is_early=is_early)
        tree, self.limits = now.tree(best), replace(self.limits, size=best)
        self._choose_plain(now, now.per_s(tree), is_early=is_early)
        if is_early:
            return
        if self.limits.stop_gain == self.limits.threshold == 0:
            self.yields.forget(NEW_LIMITS)  # those trees had no limits
        now = replace(now, limits=self.limits)
        self.limits = self._margins.limits(now, tree, max(now.per_s(tree), now.plain_per_s), self.calibration)

    def _is_early(self, now: Situation) -> bool:
        """Return whether too few trees are known to give any up."""
        is_hopeless = now.per_s(now.tree_in_use) <= self._tuning.hopeless * now.plain_per_s
        return self.yields.num_trees < self._tuning.first_trees and not is_hopeless and now.expects_trees

    def _best_size(self, now: Situation, *, is_early: bool) -> int:
        """Return the fastest of the sizes near the one in use; early on none is smaller."""
        size = self.limits.size
        per_s = {near: now.per_s(now.tree(near)) for near in now.near(self._tuning.notches)}
        best = max((near for near in per_s if near >= size or not is_early), key=per_s.__getitem__)
        return best if per_s[best] >= self._tuning.min_size_change * per_s[size] else size

    def _choose_plain(self, now: Situation, per_s: float, *, is_early: bool) -> None:
        """Choose between trees of such a speed and none."""
        least, was_plain = self._tuning.min_change, self.is_plain
        if was_plain:
            self.is_plain = per_s < least * now.plain_per_s
        elif now.is_plain_timed:
            self.is_plain = not is_early and now.plain_per_s > least * per_s
        if self.is_plain != was_plain:
            self._probes.restart()


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
