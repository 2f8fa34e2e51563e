"""Whether an expert moves or stays: by its bytes over the link, and by what the host takes for its rows."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.in_place import HostRates

RATES = HostRates(link_bytes_per_s=20.0, bytes_per_s=50.0, flops_per_s=1000.0)
EXPERT = {"expert_bytes": 100.0, "row_flops": 500.0}  # moved in 5 s, read in 2 s, 0.5 s a row


def test_the_host_reads_an_expert_once_and_then_computes_row_by_row() -> None:
    assert RATES.move_s(100) == pytest.approx(5)
    assert [RATES.host_s(**EXPERT, rows=rows) for rows in (1, 4, 5, 20)] == pytest.approx([2, 2, 2.5, 10])


def test_an_expert_of_few_rows_stays_and_one_of_many_moves() -> None:
    assert [RATES.stays(**EXPERT, rows=rows) for rows in (1, 9, 10, 11)] == [True, True, False, False]


def test_over_a_link_as_fast_as_the_host_reads_every_expert_moves() -> None:
    assert not dataclasses.replace(RATES, link_bytes_per_s=50.0).stays(**EXPERT, rows=1)


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.floats(1, 1e15), st.floats(1, 1e9), st.integers(1, 1000))
def test_whoever_stays_with_more_rows_stays_with_fewer(
    link: float, host: float, flops: float, row_flops: float, rows: int
) -> None:
    rates = HostRates(link_bytes_per_s=link, bytes_per_s=host, flops_per_s=flops)
    if rates.stays(1e6, row_flops=row_flops, rows=rows + 1):
        assert rates.stays(1e6, row_flops=row_flops, rows=rows)
