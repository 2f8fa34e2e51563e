"""Probes: which are due in a situation, what they may cost, and how they take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.tuning.costs import StepCosts
from edgespec.tuning.probes import MAX_FAR, ProbeSchedule, far_trees, known_trees, larger_tree, plain_steps
from edgespec.tuning.settings import TuningSettings
from edgespec.tuning.situation import Situation
from edgespec.tuning.tokens_by_size import MeanTree
from edgespec.tuning.tree_choice import SIZES, TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from profiles.experts import Routing
from tests.edgespec.tuning.simulated import Pair, mixture, simulate

COARSE, FINE = Routing(num_experts=8, chosen=2, spread=0.9), Routing(num_experts=128, chosen=4, spread=0.75)
SETTINGS = TuningSettings()


def situation(*, is_plain: bool = False, slow: float = 0.0, routing: Routing | None = None) -> Situation:
    """A text with trees of four nodes; a pass takes a second, and `slow` for each row, or what experts take."""
    costs = StepCosts()
    for rows in (1, 2, 3, 5, 9, 17, 33, 65, 129):
        for _ in range(3):
            costs.passes(1).observe(rows, 1.0 + slow * rows if routing is None else routing.distinct(rows))
    trees = [MeanTree(1.9 + size / 1000, size, 1.0) for size in SIZES]
    return Situation(costs=costs, num_texts=1, sizes=SIZES, trees=trees, limits=TreeLimits(4, 0.2), is_plain=is_plain)


def test_a_probe_belongs_to_trees_or_to_plain_decoding() -> None:
    trees, plain = situation(), situation(is_plain=True)
    assert (plain_steps(plain, SETTINGS), larger_tree(plain, SETTINGS), known_trees(trees, SETTINGS)) == (None,) * 3
    known, larger = known_trees(plain, SETTINGS), larger_tree(trees, SETTINGS)
    assert known.limits == TreeLimits(4, 0.2)
    assert larger.limits == TreeLimits(8, 0.05)


@pytest.mark.parametrize(("num_texts", "num_steps"), [(1, 3), (2, 2), (5, 1)])
def test_texts_in_company_show_their_trees_again_in_fewer_steps(num_texts: int, num_steps: int) -> None:
    assert known_trees(replace(situation(is_plain=True), num_texts=num_texts), SETTINGS).num_steps == num_steps


def test_a_first_tree_is_paid_for_by_all_nodes_that_it_may_have() -> None:
    """The best of usual trees has one, and the first that is grown may have four."""
    now = situation(is_plain=True, slow=0.1)
    now.costs.growth.observe(1, 1, 0.01)
    assert known_trees(replace(now, usual=[MeanTree(1.6, 1, 1)], is_tested=False), SETTINGS).lost_s > 4 * 0.1


def test_a_probe_costs_what_its_tokens_would_not_have_taken() -> None:
    now = situation()
    probe = plain_steps(now, SETTINGS)
    assert (probe.limits, probe.num_steps) == (None, 4)
    tokens = now.tree_in_use.tokens
    assert probe.lost_s == pytest.approx(4 * (1 - 1 / tokens), rel=0.01)


@pytest.mark.parametrize(("routing", "expected"), [(COARSE, MAX_FAR * 8), (FINE, None)])
def test_far_trees_are_tried_where_soon_all_experts_are_read(routing: Routing, expected: int | None) -> None:
    probe = far_trees(situation(routing=routing), SETTINGS)
    assert (probe and probe.limits and probe.limits.size) == expected


def test_a_far_tree_is_no_deeper_than_its_layers_pay() -> None:
    """A layer takes a fifth of a pass: it has to bring a fifth of the tokens that a pass brings now."""
    now = situation(routing=COARSE)
    pass_s = now.costs.passes(1).seconds(1)
    now.costs.growth.observe(1, 0, 0.2 * pass_s)
    assert far_trees(replace(now, is_plain=True), SETTINGS).limits.stop_gain == pytest.approx(0.2, rel=0.1)


def test_probes_take_turns_within_their_share_of_the_time() -> None:
    now, schedule = situation(slow=0.01), ProbeSchedule(SETTINGS)
    steps = [schedule.next(now) for _ in range(2000)]
    probes = [probe for before, probe in zip([None, *steps], steps, strict=False) if probe and probe is not before]
    late = probes[SETTINGS.first_probes :]
    assert len({probe.limits for probe in late}) >= 2, "one of them never has its turn"
    lost_s = sum(probe.lost_s for probe in late)
    assert 0.3 * SETTINGS.probe_share < lost_s / (2000 * now.step_s) < 1.2 * SETTINGS.probe_share


def test_probes_that_have_changed_nothing_often_take_ever_less_of_the_time() -> None:
    now, schedule = situation(slow=0.01), ProbeSchedule(SETTINGS)
    shares = []
    for num_steps in (1000, 8000):
        steps = [schedule.next(now) for _ in range(num_steps)]
        probes = [probe for before, probe in zip([None, *steps], steps, strict=False) if probe and probe is not before]
        shares.append(sum(probe.lost_s for probe in probes) / (len(steps) * now.step_s))
    assert shares[0] > 0.5 * SETTINGS.probe_share
    assert 0.7 * SETTINGS.least_share < shares[1] < 1.2 * SETTINGS.least_share


def test_a_probe_ends_with_the_first_step_that_shows_it_hopeless() -> None:
    now, schedule = situation(is_plain=True), ProbeSchedule(SETTINGS)
    while (probe := schedule.next(now)) is None:
        pass
    assert probe.num_steps == 3
    assert not schedule.is_over(now)
    assert schedule.is_over(situation(is_plain=True, slow=10.0))


def test_small_trees_that_are_the_best_of_their_neighbours_are_left_for_far_better_ones() -> None:
    machine = mixture(dense_s=0.02, all_experts_s=1.0, kept=0.0, layer_s=2e-3, routing=COARSE)
    choice = TreeChoice(StepCosts(), [size for size in SIZES if 4 <= size <= 256], start=TreeLimits(12, 0.25))
    for rows in (1, 2, 3, 4, 5, 8, 13, 17, 25):  # as many steps with such trees have shown
        for _ in range(3):
            choice.costs.passes(1).observe(rows, machine.pass_s(rows))
    simulate(choice, machine, Pair(seed=8), steps=300)
    assert choice.limits.size >= 64
