"""Curves that never fall, and the cost of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.cost import Curve, GrowthCost, StepCosts, fit_growth

SECONDS = st.floats(1e-5, 10)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    counts = sorted(draw(st.sets(st.integers(0, 768), min_size=1, max_size=8)))
    return Curve(tuple(map(float, counts)), tuple(draw(SECONDS) for _ in counts))


@given(curves(), st.lists(st.floats(0, 2000), min_size=2, max_size=20))
def test_more_nodes_are_never_faster_however_noisy_the_points(curve: Curve, counts: list[float]) -> None:
    seconds = curve(sorted(counts))
    assert (np.diff(seconds) >= -1e-9).all()
    assert (seconds > 0).all()


def test_a_curve_meets_its_points_and_goes_on_with_the_last_slope() -> None:
    curve = Curve((0.0, 4.0, 8.0), (1.0, 1.0, 3.0))
    assert curve([0, 4, 8, 12]).tolist() == pytest.approx([1, 1, 3, 5])
    assert (curve.slope(2), curve.slope(6), curve.slope(100)) == (0.0, 0.5, 0.5)


def test_one_slow_repeat_does_not_make_a_larger_tree_cheaper() -> None:
    curve = Curve((1.0, 2.0, 4.0), (1.0, 3.0, 2.0))
    assert curve([2, 4]).tolist() == pytest.approx([2.5, 2.5])


def test_growth_is_the_drafts_calls_and_what_the_policy_adds() -> None:
    draft = Curve((1.0, 10.0), (0.1, 1.0))
    cost = GrowthCost(base_s=0.01, layer_s=0.02, node_s=0.001, rows_per_inner=2.0)
    # Calls of 1 row (the root), 6 rows; the third layer has no call.
    seconds = cost.seconds(draft, np.array([[1.0, 3.0, 0.0]]), np.array([2]), np.array([7]))
    assert seconds.tolist() == pytest.approx([0.1 + 0.6 + 0.01 + 2 * 0.02 + 7 * 0.001])


def test_texts_that_share_a_pass_share_the_drafts_calls() -> None:
    draft = Curve((1.0, 10.0), (0.1, 1.0))
    cost = GrowthCost(base_s=0.01, layer_s=0.02, node_s=0.001, rows_per_inner=2.0)
    # Calls of 4 rows (the roots), 24 rows.
    seconds = cost.seconds(draft, np.array([[1.0, 3.0]]), np.array([2]), np.array([7]), num_texts=4)
    assert seconds.tolist() == pytest.approx([0.4 + 2.4 + 0.01 + 2 * 0.02 + 4 * 7 * 0.001])
    costs = StepCosts(verify=Curve((0.0, 100.0), (2.0, 3.0)), draft=draft, rest_s=0.1, plain_step_s=2.1, num_texts=4)
    assert costs.step(np.array([0.2]), [5]).tolist() == pytest.approx([0.2 + 2.2 + 0.1])


@given(st.floats(0, 0.01), st.floats(0, 0.01), st.floats(0, 0.001))
def test_a_fit_finds_the_costs_that_made_the_times(base_s: float, layer_s: float, node_s: float) -> None:
    draft = Curve((1.0, 100.0), (0.001, 0.01))
    inner = [[1.0], [1.0, 2.0], [1.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0], [1.0, 8.0]]
    nodes = [3.0, 9.0, 20.0, 4.0, 60.0]
    true = GrowthCost(base_s=base_s, layer_s=layer_s, node_s=node_s, rows_per_inner=1.5)
    padded = np.array([[*row, *[0.0] * (4 - len(row))] for row in inner])
    seconds = true.seconds(draft, padded, (padded > 0).sum(1), nodes)
    found = fit_growth(draft, inner, nodes, seconds.tolist(), 1.5)
    again = found.seconds(draft, padded, (padded > 0).sum(1), nodes)
    assert again == pytest.approx(seconds, rel=1e-4)
    assert min(found.base_s, found.layer_s, found.node_s) >= 0


def test_growth_that_never_drafts_anything_can_be_fitted() -> None:
    found = fit_growth(Curve((1.0,), (0.001,)), [[], []], [0, 0], [0.002, 0.002], 1.0)
    assert found.base_s == pytest.approx(0.002)


def test_a_stream_that_read_ahead_while_the_tree_grew_saves_no_more_than_either_took() -> None:
    costs = StepCosts(verify=Curve((0.0,), (2.0,)), draft=Curve((1.0,), (0.1,)), rest_s=0.1, plain_step_s=2.1,
                      prefetch_s=0.5)  # fmt: skip
    assert costs.step(np.array([0.2, 3.0]), [4, 4]).tolist() == pytest.approx([2.1, 4.6])
