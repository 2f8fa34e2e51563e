"""Costs learned from steps: the curve of a known machine, hiccups, and a machine that is slow for a while."""

from __future__ import annotations

import random

import pytest

from edgespec.draft.calls import DraftCalls
from edgespec.tuning.costs import NODES_A_CALL, GrowthCosts, PassCosts, StepCosts


def pass_s(rows: float) -> float:
    """Flat while weights stream, then a second for every hundred rows."""
    return max(1.0, rows / 100)


def learned(rows: list[int]) -> PassCosts:
    found = PassCosts()
    for count in rows:
        found.observe(count, pass_s(count))
    return found


def test_the_curve_goes_through_what_was_seen_and_on_with_the_flatter_line() -> None:
    found = learned([1, 10, 100, 200, 400] * 3)
    for rows in (1, 5, 10, 100, 150, 200, 400):
        assert found.seconds(rows) == pytest.approx(pass_s(rows), rel=1e-6)
    assert found.seconds(500) == pytest.approx(4 + 100 * 3 / 399), "the whole line rises less than the last part"


@pytest.mark.parametrize("rows", [4, 8, 16, 32])
def test_a_block_of_rows_more_is_another_size(rows: int) -> None:
    found = PassCosts()
    for _ in range(5):
        found.observe(rows, 1.0)
        found.observe(rows + 1, 1.3)  # a kernel begins its next block
    assert found.seconds(rows) == pytest.approx(1.0)
    assert found.seconds(rows + 1) == pytest.approx(1.3)


def test_nothing_is_known_before_the_first_pass() -> None:
    assert PassCosts().seconds(9) == 0
    assert learned([9]).seconds(100) == pytest.approx(1.0), "one size says nothing about others"


def test_what_is_known_from_elsewhere_is_where_learning_begins() -> None:
    found = PassCosts([(1, 1.0), (65, 2.0)])
    assert found.seconds(33) == pytest.approx(1.5)
    for _ in range(5):
        found.observe(65, 4.0)  # half as fast as when it was measured
    assert found.seconds(1) == pytest.approx(2.0), "a machine that is slow at one size is slow at all"


@pytest.mark.parametrize("at", [0, 1, 2, 5, 30])
def test_one_hiccup_moves_nothing(at: int) -> None:
    sizes = [9, 1, 17, 9, 33, 9, *[1, 9, 17, 33] * 10]
    calm, shaken = PassCosts(), PassCosts()
    for step, rows in enumerate(sizes):
        calm.observe(rows, pass_s(rows))
        shaken.observe(rows, pass_s(rows) * (100 if step == at else 1))
        if step >= at + 4:
            for count in (1, 9, 17, 33):
                assert shaken.seconds(count) <= 2.1 * calm.seconds(count)
    assert [shaken.seconds(rows) for rows in (1, 9, 17, 33)] == pytest.approx([1.0] * 4)


def test_a_busy_machine_is_slow_at_all_sizes_and_soon_fast_again() -> None:
    found = learned([1, 9, 17, 33] * 5)
    noise = random.Random(7)
    for _ in range(40):
        found.observe(17, 3 * noise.uniform(0.9, 1.1))
    assert found.seconds(1) == pytest.approx(3.0, rel=0.15), "though no pass of one row was seen meanwhile"
    for _ in range(4):
        found.observe(17, 1.0)
    assert found.seconds(1) == pytest.approx(1.0, rel=0.1)
    assert found.seconds(17) == pytest.approx(1.0, rel=0.1)


def test_being_asked_between_passes_changes_no_answer() -> None:
    asked, silent, noise = PassCosts(), PassCosts(), random.Random(5)
    for _ in range(300):
        rows = noise.choice([1, 2, 5, 6, 9, 40])
        seconds = pass_s(rows) * noise.uniform(0.8, 1.3)
        asked.observe(rows, seconds)
        silent.observe(rows, seconds)
        [asked.seconds(count) for count in (1, 3, 6, 80)]
    assert [asked.seconds(rows) for rows in (1, 3, 6, 80)] == [silent.seconds(rows) for rows in (1, 3, 6, 80)]


def test_what_a_draft_takes_to_read_is_learned_from_long_readings_more_than_from_short_ones() -> None:
    found = GrowthCosts()
    found.row_s = 1e-5  # as the first growth had it
    found.observe_read(4, 0.4)  # a hiccup
    assert found.row_s < 2e-3
    for _ in range(2):
        found.observe_read(4000, 4000 * 3e-5)
    assert found.row_s == pytest.approx(3e-5, rel=0.3)


def test_growth_is_told_apart_into_tree_layers_and_nodes() -> None:
    found, noise = GrowthCosts(), random.Random(7)
    for _ in range(200):
        layers = noise.randint(1, 8)
        nodes = layers * noise.randint(1, 8)
        found.observe(layers, nodes, (2e-3 + 5e-3 * layers + 1e-4 * nodes) * noise.uniform(0.95, 1.05))
    for layers, nodes in ((1, 1), (3, 12), (8, 64)):
        assert found.seconds(layers, nodes) == pytest.approx(2e-3 + 5e-3 * layers + 1e-4 * nodes, rel=0.2)


def test_growth_seen_once_is_mostly_its_layers() -> None:
    found = GrowthCosts()
    found.observe(4, 8, 0.05)
    assert found.seconds(4, 8) == pytest.approx(0.05, rel=0.01)
    assert found.seconds(1, 0) == pytest.approx(0.05 / (4 + 8 / NODES_A_CALL), rel=0.05)


def test_a_call_that_found_no_node_is_no_division_by_nothing() -> None:
    found = GrowthCosts()
    found._seconds = [0.0, 0.0, 1e-3]  # as a fit to large trees may say
    found._guess, found._num_trees = [0.0, 1e-3, 1e-3], 5
    found.observe(1, 0, 0.01)
    assert found.seconds(1, 0) > 0


def test_one_hiccup_of_growth_moves_little() -> None:
    found = GrowthCosts()
    for step in range(30):
        found.observe(4, 8, 5.0 if step == 10 else 0.05)
        if step > 12:
            assert found.seconds(4, 8) == pytest.approx(0.05, rel=0.3)
    assert found.seconds(4, 8) == pytest.approx(0.05, rel=0.1)


def test_passes_of_many_texts_have_costs_of_their_own() -> None:
    """Rows of many texts cost more than as many rows of one; each number of texts begins where the nearest is."""
    costs = StepCosts()
    for _ in range(20):
        costs.passes(1).observe(17, 1.0)
    assert costs.passes(16).seconds(17) == pytest.approx(1.0)
    for _ in range(20):
        costs.passes(16).observe(17, 3.0)
    assert costs.passes(16).seconds(17) == pytest.approx(3.0)
    assert costs.passes(1).seconds(17) == pytest.approx(1.0)


def test_a_layer_of_a_tree_that_one_pass_guesses_costs_no_call() -> None:
    """The first tree is mostly its pass: a deeper one costs little more, and none is deeper than the block."""
    block, layers = GrowthCosts(calls=DraftCalls(num_places=7, num_rows=8)), GrowthCosts()
    for found in (block, layers):
        found.observe(3, 12, 0.02)
    assert block.seconds(7, 12) < 1.3 * block.seconds(3, 12)
    assert block.seconds(7, 12) == block.seconds(20, 12)
    assert layers.seconds(7, 12) > 1.9 * layers.seconds(3, 12)
    noise = random.Random(7)
    for _ in range(200):
        deep = noise.randint(1, 7)
        nodes = deep * noise.randint(1, 8)
        block.observe(deep, nodes, (2e-2 + 3e-4 * deep + 1e-5 * nodes) * noise.uniform(0.95, 1.05))
    assert block.seconds(1, 4) == pytest.approx(2.03e-2, rel=0.1)
    assert block.seconds(7, 40) == pytest.approx(2.25e-2, rel=0.2)


def test_a_number_of_texts_that_was_looked_at_before_any_pass_learns_from_the_others() -> None:
    costs = StepCosts()
    assert costs.passes(1).seconds(1) == 0
    costs.passes(4).observe(4, 0.2)
    assert costs.plain_s(1) > 0


def test_below_the_fewest_rows_seen_the_line_goes_on_but_no_row_saves_more_than_its_share() -> None:
    """In company most passes have looked up rows, and those of roots alone are seldom seen."""
    assert PassCosts([(16, 0.020), (64, 0.036)]).seconds(4) == pytest.approx(0.016)
    assert PassCosts([(16, 0.020), (64, 0.200)]).seconds(4) == pytest.approx(0.005)
    assert PassCosts([(16, 0.020)]).seconds(4) == pytest.approx(0.020)


def test_rows_of_texts_in_company_have_a_price_before_a_few_passes_have_shown_it() -> None:
    """One pass that took as long as that of the roots, or a first one of roots that took longer, says little."""
    costs = StepCosts()
    costs.passes(5).observe(5, 1.0)
    for number in range(4):
        assert costs.rows_s(5, 3) == pytest.approx(0.0 if number == 3 else 0.15), number
        assert costs.rows_s(1, 3) == pytest.approx(0.0)
        costs.passes(5).observe(8, 1.0)
