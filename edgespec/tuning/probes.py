"""Probes: steps with other trees than those in use, or with none, which show what those would bring.

All probes share one budget of time. They take turns, and the next one begins when a share of the time since the last
one covers what it is expected to lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.tuning.settings import TuningSettings
from edgespec.tuning.situation import Situation
from edgespec.tuning.tokens_by_size import MeanTree, TokensBySize
from edgespec.tuning.tree_limits import MAX_GAIN, MAX_SCORE, TreeLimits

PLAIN_STEPS = 4  # a pass after trees finds other experts in memory than plain decoding keeps there
NUM_TREES = 3  # of a probe whose trees are judged
LOWER_THRESHOLD = 4.0  # times lower is the threshold of a larger tree
MAX_FAR_TIMES = 1.25  # as long as the largest neighbour's step may a far larger tree's be
SUMS_LATER = 0.08  # of the steps since the last probe: so much later than it is covered may the next one begin
MIN_FAR, MAX_FAR = 2, 8  # times the nodes of the largest neighbour


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Steps with trees of these limits, or without trees."""

    limits: TreeLimits | None
    num_steps: int
    lost_s: float = 0.0  # that all of them are expected to take beyond those that their tokens take now
    is_due: bool = False  # at any budget
    is_apart: bool = False  # its trees alone say what its size yields


def plain_steps(now: Situation, settings: TuningSettings) -> Probe | None:
    """Return steps without trees: one if trees are far ahead, where further ones would change nothing.

    None where a pass of roots takes what the others take: what is looked up is known beside trees as well.
    """
    if now.is_plain or now.is_flat:
        return None
    if not now.is_plain_timed:
        # Where passes are slow, a plain one for every number of texts would cost more than it shows.
        least_s = now.costs.least_plain_s(now.num_texts)
        may_be_faster = now.tree_in_use.tokens * least_s < now.step_s
        return Probe(limits=None, num_steps=1, is_due=True) if may_be_faster else None
    num_steps = PLAIN_STEPS if now.plain_per_s > settings.hopeless * now.per_s_in_use else 1
    return Probe(limits=None, num_steps=num_steps, lost_s=num_steps * now.plain_lost_s())


def larger_tree(now: Situation, settings: TuningSettings) -> Probe | None:
    """Return a step with a larger tree, whose nodes may be worth less."""
    if now.is_plain:
        return None
    size, limits = now.near(settings.notches)[-1], now.limits
    larger = TreeLimits(size, limits.threshold / LOWER_THRESHOLD, limits.stop_gain)
    return Probe(limits=larger, num_steps=1, lost_s=now.lost_s(now.tree(size)))


def known_trees(now: Situation, settings: TuningSettings) -> Probe | None:
    """Return steps with the trees that were last in use, while decoding is plain."""
    if not now.is_plain:
        return None
    growth = now.costs.growth
    read_s = growth.seconds(1, 0) + growth.row_s * now.num_unread  # the draft reads what plain steps wrote
    if not now.is_tested:
        if not now.may_pay:
            return None
        # What it brings is not known: all that it takes may be lost, of as many nodes as it may have.
        tree = replace(now.usual_tree, nodes=max(now.usual_tree.nodes, now.limits.size))
        tree_s = now.costs.of(tree, now.num_texts) - now.costs.plain_s(now.num_texts)
        return Probe(limits=now.limits, num_steps=1, lost_s=tree_s + read_s)
    tree = now.tree_in_use
    is_hopeless = now.per_s(tree) <= settings.hopeless * now.plain_per_s
    num_steps = 1 if is_hopeless else math.ceil(NUM_TREES / now.num_texts)
    return Probe(limits=now.limits, num_steps=num_steps, lost_s=num_steps * now.lost_s(tree) + read_s)


def far_trees(now: Situation, settings: TuningSettings) -> Probe | None:
    """Return steps with the largest trees whose passes hardly take longer than the largest neighbour's.

    Sizes are compared with their neighbours. Where the first rows of a pass cost most, as those of a mixture with few
    large experts do, small trees cost much and large ones little more, which no neighbour shows.
    """
    if not now.is_tested:
        return None
    near, layers = now.near(settings.notches)[-1], 2 * now.tree_in_use.layers
    far = [size for size in now.sizes if MIN_FAR * near <= size <= MAX_FAR * near]

    def step_s(size: int) -> float:
        return now.costs.of(MeanTree(1.0, size, layers), now.num_texts)

    size = max((size for size in far if step_s(size) <= MAX_FAR_TIMES * step_s(near)), default=None)
    if size is None:
        return None
    tree = MeanTree(now.tree(size).tokens, size, layers)
    num_steps = math.ceil(NUM_TREES / now.num_texts)
    _, layer_s, _ = now.costs.growth.parts()
    gain = now.per_s_in_use * layer_s / now.num_texts  # that a layer has to bring
    limits = TreeLimits(size).nearer_to(0.0, gain, met=(MAX_SCORE, MAX_GAIN))
    return Probe(limits=limits, num_steps=num_steps, lost_s=num_steps * now.lost_s(tree), is_apart=True)


MakeProbe = Callable[[Situation, TuningSettings], Probe | None]
PROBES: tuple[MakeProbe, ...] = (plain_steps, known_trees, far_trees, larger_tree)


class ProbeSchedule:
    """The running probe, and the time of the next one."""

    def __init__(self, settings: TuningSettings, *, probes: Sequence[MakeProbe] = PROBES) -> None:
        self._settings, self._probes = settings, probes
        self.under_way: Probe | None = None
        self.found: TokensBySize | None = None  # by the trees of a probe that is judged by them alone
        self._num_steps = 0  # of the running probe, or since the last one
        self._passed_s = 0.0  # since the last probe
        self._num_passed_by = 0  # steps whose seconds are not in it yet
        self._next_sums = 0  # at which step they are made again
        self._num_probes = 0  # since trees came or went

    def restart(self) -> None:
        """Begin anew, because trees have come or gone."""
        self.under_way, self.found = None, None
        self._num_probes = self._num_steps = self._num_passed_by = self._next_sums = 0
        self._passed_s = 0.0

    def is_over(self, now: Situation) -> bool:
        """Return whether no probe runs, or the running one has its result."""
        probe = self.under_way
        if probe is None or self._num_steps >= probe.num_steps:
            return True
        return self._num_steps > 0 and self._speed(probe, now) < self._settings.hopeless * now.per_s_in_use

    def went_by(self, num_steps: int) -> None:
        """Note steps with the settings in use that were not asked about."""
        if self.under_way is None:
            self._num_steps += num_steps
            self._num_passed_by += num_steps

    def passes_by(self) -> bool:
        """Return whether no probe can begin at this step of plain decoding: the sums take a part of a short one."""
        if self.under_way is not None or self._num_steps >= self._next_sums:
            return False
        self._num_steps += 1
        self._num_passed_by += 1
        return True

    def next(self, now: Situation) -> Probe | None:
        """Return the probe of the next step; None is for a step with the settings in use."""
        if self.under_way is not None and self.is_over(now):
            self.under_way, self.found = None, None
            self._num_steps = self._num_passed_by = 0
            self._passed_s = 0.0
        if self.under_way is None:
            self._passed_s += now.step_s * (1 + self._num_passed_by)
            self._num_passed_by = 0
            self._next_sums = self._num_steps + max(self._settings.min_wait, int(SUMS_LATER * self._num_steps))
            self._begin(now)
        self._num_steps += 1
        return self.under_way

    def learn(self, expected: Sequence[float], layers: Sequence[int], limit: int, num_trees: int) -> None:
        """Note trees of a step: each node's expected tokens and layer, best score first."""
        probe = self.under_way
        if self.found is not None and probe is not None and probe.limits is not None and probe.limits.size == limit:
            self.found.learn(expected, layers, limit, num_trees)

    def tree_apart(self) -> MeanTree | None:
        """Return what the trees of a probe that is judged by them alone yielded; None before the first."""
        if self.found is None or not self.found.num_trees:
            return None
        assert self.under_way is not None
        assert self.under_way.limits is not None
        return self.found.all()[self.found.sizes.index(self.under_way.limits.size)]

    def _begin(self, now: Situation) -> None:
        """Let the next probe begin, if its turn has come."""
        found = [(make, probe) for make in self._probes if (probe := make(now, self._settings)) is not None]
        due = next(((make, probe) for make, probe in found if probe.is_due), None)
        if due is None and found and self._is_covered(found[0][1], now):
            due = found[0]
        if due is None:
            return
        make, self.under_way = due
        if not self.under_way.is_due:
            self._num_probes += 1
            self._probes = [*(other for other in self._probes if other is not make), make]
        self.found = TokensBySize(now.sizes) if self.under_way.is_apart else None
        self._num_steps = 0

    def _is_covered(self, probe: Probe, now: Situation) -> bool:
        settings = self._settings
        # Where trees were expected to pay, few steps may have decided against them; elsewhere there is no hurry.
        is_first = self._num_probes < settings.first_probes and not (now.is_plain and not now.expects_trees)
        if self._num_steps >= (settings.max_first_wait if is_first else settings.max_wait):
            return True
        share = settings.first_share if is_first else self._share()
        return self._num_steps >= settings.min_wait and share * self._passed_s >= probe.lost_s

    def _share(self) -> float:
        """Return the share of the time for a probe: what has changed nothing often is seldom tried."""
        settings = self._settings
        return max(
            settings.least_share, settings.probe_share * min(1.0, settings.full_probes / max(1, self._num_probes))
        )

    def _speed(self, probe: Probe, now: Situation) -> float:
        """Return the tokens a second of a probe, as far as its steps have shown them."""
        if probe.limits is None:
            return now.plain_per_s
        if probe.is_apart:
            tree = self.tree_apart()
            return math.inf if tree is None else now.per_s(tree)
        return now.per_s(now.tree(probe.limits.size))
