"""The largest numbers of rows, found block by block: the same as a sort finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.grow import children
from edgespec.grow.children import BLOCK, MIN_BLOCKS, best_children, largest, under_noise


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 4), columns=st.integers(1, 12 * BLOCK), count=st.integers(1, 4), seed=st.integers(0, 1000)
)
def test_the_largest_are_those_that_a_sort_puts_first(num_rows: int, columns: int, count: int, seed: int) -> None:
    count = min(count, columns)
    rows = torch.rand(num_rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens, values = largest(rows, count)
    expected = rows.sort(-1, descending=True)
    assert torch.equal(values, expected.values[:, :count])
    assert torch.equal(tokens, expected.indices[:, :count])


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 4])
def test_a_block_may_hold_all_of_them_and_so_may_the_columns_behind_the_last(place: int) -> None:
    rows = torch.zeros(1, MIN_BLOCKS * 2 * BLOCK + 6)
    rows[0, place], rows[0, place + 1] = 1.0, 2.0
    tokens, values = largest(rows, 2)
    assert (tokens.tolist(), values.tolist()) == ([[place + 1, place]], [[2.0, 1.0]])


@pytest.mark.parametrize("columns", [9, 2000, 2050])
@pytest.mark.parametrize("chunk", [1, 5000, 1 << 20])
def test_the_best_children_are_those_of_the_whole_perturbed_distribution(
    columns: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(7, columns, generator=generator).softmax(-1)
    noise = torch.empty(columns, dtype=torch.float64).exponential_(generator=generator).reciprocal_()
    for shared in (None, noise):
        whole = q if shared is None else under_noise(q, shared)
        tokens, values = best_children(q, 8, shared)
        expected = whole.topk(8, -1)
        assert torch.equal(tokens, expected.indices)
        torch.testing.assert_close(values, expected.values, rtol=1e-6, atol=0)
