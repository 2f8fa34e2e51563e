"""The spread of choices is found again from its counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.experts import INDEPENDENT, Routing
from scripts.make.expert_spread import fit_spread


@given(st.floats(0.1, 1.0), st.integers(1, 4))
def test_a_spread_is_found_again_from_its_counts(spread: float, num_texts: int) -> None:
    routing = Routing(num_experts=128, chosen=4, spread=spread)
    counted = [(rows, routing.distinct(rows, num_texts=num_texts)) for rows in (1, 4, 16, 64)]
    assert fit_spread(counted, num_experts=128, chosen=4, num_texts=num_texts) == pytest.approx(spread, abs=0.01)


def test_counts_that_say_nothing_leave_rows_independent() -> None:
    assert fit_spread([(1, 4.0)], num_experts=128, chosen=4) == INDEPENDENT
    assert fit_spread([(4, 16.0)], num_experts=128, chosen=4) == INDEPENDENT, "more than independent rows ask for"
