"""Trials of far larger trees: begun where passes over them take little longer, and judged by their own trees."""

from __future__ import annotations

import pytest

from edgespec.tuning.costs import StepCosts
from edgespec.tuning.far_trial import FARTHEST, TREES, FarTrial
from edgespec.tuning.tree_choice import SIZES, TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from profiles.experts import Routing
from tests.edgespec.tuning.simulated import Pair, mixture, simulate

COARSE, FINE = Routing(num_experts=8, chosen=2, spread=0.9), Routing(num_experts=128, chosen=4, spread=0.75)


@pytest.mark.parametrize(("routing", "expected"), [(COARSE, FARTHEST * 16), (FINE, None)])
def test_it_begins_where_soon_all_experts_are_asked_for(routing: Routing, expected: int | None) -> None:
    trial = FarTrial()
    trial.begin(SIZES, 16, lambda size: routing.distinct(1 + size))
    assert trial.size == expected


def test_it_is_done_after_its_trees_and_says_what_they_alone_yielded() -> None:
    trial = FarTrial()
    assert trial.found(SIZES) is None, "there is none"
    trial.begin(SIZES, 4, lambda _size: 1.0)
    assert trial.size == 4 * FARTHEST
    assert trial.found(SIZES) is None, "none of its trees is known"
    for number in range(1, TREES + 1):
        trial.learn([0.5] * 8 + [0.25] * 8, [1] * 8 + [2] * 8, 1)
        assert trial.is_done == (number == TREES)
    found = trial.found(SIZES)
    assert found is not None
    yields, of_size = found
    assert (of_size.tokens, of_size.nodes, of_size.layers) == (1 + 4 + 2, 16, 2)
    assert yields.num_trees == TREES
    trial.begin(SIZES, 4, lambda size: float(size))
    assert trial.size is None, "passes that cost by the node are not tried"


def test_small_trees_that_are_the_best_of_their_neighbours_are_left_for_far_better_ones() -> None:
    machine = mixture(dense_s=0.02, all_experts_s=1.0, kept=0.0, layer_s=2e-3, routing=COARSE)
    choice = TreeChoice(StepCosts(), [size for size in SIZES if 4 <= size <= 256], start=TreeLimits(12, 0.25))
    for rows in (1, 2, 3, 4, 5, 8, 13, 17, 25):  # as many steps with such trees have shown
        for _ in range(3):
            choice.costs.passes(1).observe(rows, machine.pass_s(rows))
    simulate(choice, machine, Pair(seed=8), steps=300)
    assert choice.wanted.size >= 64
