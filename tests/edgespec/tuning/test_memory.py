"""What tuning has learned is kept, and a tuner that begins with it begins where the first one ended."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from pydantic import TypeAdapter

from edgespec import SamplingSettings, TreeSettings
from edgespec.tuning.memory import growth_seconds, pass_curves, plan_of
from edgespec.tuning.tree_choice import TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from edgespec.tuning.tuner import Tuner
from profiles.schema import Plan, Profile, TemperaturePlan
from tests.edgespec.tuning.simulated import Machine, Pair, simulate
from tests.profiles.examples import example_profile

FAST = Machine(pass_s=lambda rows: 0.05 + 0.0024 * rows, layer_s=2e-3, node_s=2e-4)
HOPELESS = Machine(pass_s=lambda rows: 0.01 * rows, layer_s=1e-3)
LARGEST = TreeSettings(size=256)


def learned(machine: Machine, *, first: tuple[float, float] = (0.3, 0.7)) -> tuple[TreeChoice, Profile]:
    """What is known after some steps, and the profile that keeps it."""
    choice = Tuner(TreeSettings(), LARGEST).choice(SamplingSettings())
    simulate(choice, machine, Pair(first=first), steps=300)
    plan = TemperaturePlan(temperature=0.0, best=plan_of(choice, 1))
    passes = pass_curves(choice.costs, {1})
    return choice, replace(example_profile(), passes=passes, growth=growth_seconds(choice.costs), plans=(plan,))


def test_a_tuner_begins_where_the_first_one_ended() -> None:
    first, profile = learned(FAST)
    later = Tuner(TreeSettings(), LARGEST, profile=profile).choice(SamplingSettings())
    later.begin_step(0, 1)
    assert later.in_step == first.limits
    assert later.yields.num_trees == first.yields.num_trees
    for rows in (1, 5, 17, 60):
        assert later.costs.passes(1).seconds(rows) == pytest.approx(first.costs.passes(1).seconds(rows), rel=0.01)
    assert later.costs.growth.seconds(3, 9) == pytest.approx(first.costs.growth.seconds(3, 9), rel=0.01)
    assert later.calibration.ratios == pytest.approx(first.calibration.ratios)
    known = len(first.yields.seen())
    assert [(tree.tokens, tree.nodes, tree.layers) for tree in later.yields.all()[:known]] == [
        pytest.approx((tree.tokens, tree.nodes, tree.layers)) for tree in first.yields.all()[:known]
    ]


def test_what_it_learned_goes_on_to_count() -> None:
    """Its first steps are as fast as the last ones of a run that has found its trees."""
    first, profile = learned(FAST)
    later = Tuner(TreeSettings(), LARGEST, profile=profile).choice(SamplingSettings())
    steps = simulate(later, FAST, Pair(), steps=12)
    assert {step.nodes for step in steps if step.nodes} <= {
        step.nodes for step in simulate(first, FAST, Pair(), steps=200)
    }


def test_the_memory_survives_a_file() -> None:
    _, profile = learned(FAST)
    plan = profile.plans[0].best
    assert TypeAdapter(Plan).validate_python(asdict(plan)) == plan


def test_where_plain_decoding_is_faster_the_plan_says_so_and_a_tuner_begins_without_trees() -> None:
    first, profile = learned(HOPELESS, first=(0.1, 0.4))
    plan = profile.plans[0].best
    assert first.is_plain
    assert (plan.pays, plan.policy, plan.tokens_per_s) == (False, "none", pytest.approx(1 / 0.01, rel=0.05))
    assert Tuner(TreeSettings(), LARGEST, profile=profile).choice(SamplingSettings()).is_plain


def test_between_known_sizes_a_line_is_drawn_and_a_smaller_largest_tree_is_kept_to() -> None:
    _, profile = learned(FAST)
    plan = replace(profile.plans[0].best, size=96, threshold=0.1)
    profile = replace(profile, plans=(replace(profile.plans[0], best=plan),))
    choice = Tuner(TreeSettings(), TreeSettings(size=10), profile=profile).choice(SamplingSettings())
    assert choice.limits == TreeLimits(10, 0.1, plan.stop_gain)
    eight, ten = (choice.yields.all()[choice.yields.sizes.index(size)].tokens for size in (8, 10))
    known = {at.size: at.tokens for at in plan.by_size}
    assert eight == pytest.approx(known[8])
    assert ten == pytest.approx((known[8] + known[12]) / 2)


def test_several_texts_begin_with_what_several_have_learned() -> None:
    _, profile = learned(FAST)
    best = profile.plans[0].best
    several = replace(best, num_texts=4, size=4, threshold=0.2)
    profile = replace(profile, plans=(replace(profile.plans[0], by_texts=(several,)),))
    for num_texts, plan in ((1, best), (5, several), (16, several)):
        choice = Tuner(TreeSettings(), LARGEST, profile=profile, num_texts=num_texts).choice(SamplingSettings())
        assert choice.limits == TreeLimits(plan.size, plan.threshold, plan.stop_gain)


def test_another_policys_trees_have_learned_nothing_of_it() -> None:
    _, profile = learned(FAST)
    largest = TreeSettings(policy="eagle2", size=256)
    choice = Tuner(largest, largest, profile=profile).choice(SamplingSettings())
    assert choice.yields.num_trees == 0
    assert choice.costs.passes(1).times_seen(1), "passes take what they take"


def test_sizes_that_are_to_be_visited_come_first() -> None:
    choice = Tuner(TreeSettings(), LARGEST).choice(SamplingSettings())
    choice.places[:] = [None, TreeLimits(64)]
    found = []
    for number in range(3):
        choice.begin_step(number, 1)
        choice.begin_step(number, 1)  # of another text
        found.append(choice.in_step)
    assert found[:2] == [None, TreeLimits(64)]
    assert found[2] != TreeLimits(64)
