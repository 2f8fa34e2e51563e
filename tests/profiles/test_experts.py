"""Experts that rows ask for and caches lack: the curves beside simulations, and beside what others counted."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.experts import INDEPENDENT, MIN_SPREAD, Routing

routings = st.builds(
    lambda num_experts, share, spread: Routing(
        num_experts=num_experts, chosen=max(1, round(share * num_experts)), spread=spread
    ),
    num_experts=st.integers(2, 512),
    share=st.floats(0, 1),
    spread=st.floats(MIN_SPREAD, INDEPENDENT),
)


def chooses(routing: Routing, draw: random.Random) -> set[int]:
    return set(draw.sample(range(routing.num_experts), routing.chosen))


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize(("num_experts", "chosen"), [(128, 4), (128, 8), (512, 10), (8, 2)])
def test_independent_rows_ask_for_what_a_simulation_counts(num_experts: int, chosen: int, rows: int) -> None:
    routing, draw = Routing(num_experts=num_experts, chosen=chosen), random.Random(7)
    counts = [len(set().union(*(chooses(routing, draw) for _ in range(rows)))) for _ in range(300)]
    assert routing.distinct(rows) == pytest.approx(sum(counts) / len(counts), rel=0.03)


def test_a_cache_of_independent_rows_lacks_what_a_simulation_counts() -> None:
    routing, draw = Routing(num_experts=64, chosen=4), random.Random(7)
    for kept, rows in ((16, 1), (32, 1), (32, 8), (48, 4)):
        cache: OrderedDict[int, None] = OrderedDict()
        missed = 0
        for number in range(700):
            asked = set().union(*(chooses(routing, draw) for _ in range(rows)))
            missed += len(asked - cache.keys()) if number >= 100 else 0
            for expert in asked:
                cache[expert] = None
                cache.move_to_end(expert)
            while len(cache) > kept:
                cache.popitem(last=False)
        assert routing.fetched(rows, kept=kept) == pytest.approx(missed / 600, rel=0.06)


@pytest.mark.parametrize(
    ("num_experts", "chosen", "spread", "share", "counted"),
    [
        (128, 8, 0.65, 0.4, 0.89),  # Qwen3-30B-A3B, kekzl/imp pull request 1365
        (512, 10, 0.7, 0.125, 0.67),  # Qwen3.8-Flash-Next, llama.cpp pull request 27861
        (512, 10, 0.7, 0.25, 0.81),
        (512, 10, 0.9, 93 / 512, 0.435),  # NVFP4 of the same, kekzl/imp pull request 2061
        (512, 10, 0.9, 186 / 512, 0.62),
        (512, 10, 0.9, 279 / 512, 0.72),
    ],
)
def test_the_hits_of_published_caches_are_met_within_seven_points(
    num_experts: int, chosen: int, spread: float, share: float, counted: float
) -> None:
    routing = Routing(num_experts=num_experts, chosen=chosen, spread=spread)
    assert 1 - routing.fetched(1, kept=share * num_experts) / chosen == pytest.approx(counted, abs=0.07)


def test_one_exponent_describes_what_repeats_at_the_next_token_and_within_eight() -> None:
    """45 % and 80 % of Qwen3-30B-A3B's choices; Cohere's models load 2.5 tokens' experts for four."""
    routing = Routing(num_experts=128, chosen=8, spread=0.65)
    repeats = [1 - (routing.distinct(rows + 1) - routing.distinct(rows)) / 8 for rows in (1, 8)]
    assert repeats == pytest.approx([0.45, 0.80], abs=0.05)
    assert Routing(num_experts=128, chosen=8, spread=0.7).distinct(4) / 8 == pytest.approx(2.5, abs=0.05)


@given(routings, st.floats(1, 500), st.floats(0, 500), st.integers(1, 16), st.floats(0, 1), st.floats(0, 1))
def test_more_rows_ask_for_more_and_more_that_is_kept_leaves_less_to_fetch(
    routing: Routing, rows: float, more: float, num_texts: int, share: float, other: float
) -> None:
    rounding = 1e-6 * routing.num_experts
    few, many = (routing.distinct(count, num_texts=num_texts) for count in (rows, rows + more))
    assert few <= many + rounding
    assert many <= routing.num_experts + rounding
    less, kept = sorted(share_of * routing.num_experts for share_of in (share, other))
    fetched = routing.fetched(rows, kept=kept, num_texts=num_texts)
    assert fetched + rounding >= 0
    assert fetched <= routing.fetched(rows, kept=less, num_texts=num_texts) + rounding
    assert routing.fetched(rows, kept=0, num_texts=num_texts) == pytest.approx(few)
    assert routing.fetched(rows, kept=routing.num_experts, num_texts=num_texts) == 0


@given(routings, st.integers(1, 16), st.integers(1, 32))
def test_rows_of_several_texts_are_less_alike_than_those_of_one(routing: Routing, num_texts: int, rows: int) -> None:
    together = routing.distinct(num_texts * rows, num_texts=num_texts)
    assert together >= routing.distinct(num_texts * rows) - 1e-9
    independent = Routing(num_experts=routing.num_experts, chosen=routing.chosen)
    assert together <= independent.distinct(num_texts * rows) + 1e-9
