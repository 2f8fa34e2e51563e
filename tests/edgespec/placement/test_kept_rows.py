"""Rows of ended texts take what fits the machine: a small model does not fill a large memory with them."""

import pytest

from edgespec.placement.cache_memory import most_kept_bytes
from offload.placement import Placement

MIB = 1 << 20


@pytest.mark.parametrize(
    ("rows", "weights", "memory", "num_resident", "most"),
    [
        (2500, 253, 16_000, 2, 625),  # one text of full length
        (2500, 253, 32_000, 2, 1000),  # a share of the memory
        (2500, 1200, 16_000, 2, 1200),  # as much as the weights
        (2500, 7000, 16_000, 2, 2500),  # no more than is planned
        (2500, 253, 16_000, 1, 2500),  # all that is planned, where weights are streamed
    ],
)
def test_the_bound(rows: int, weights: int, memory: int, num_resident: int, most: int) -> None:
    uses = {
        "target: keys and values": rows - 100, "draft: keys and values": 60, "target: recurrent states": 40,
        "target: embeddings, norms, head": 30, "draft: weights": 20, "2 resident layers": weights - 50,
        "target: one pass": 9999,
    }  # fmt: skip
    placement = Placement(
        num_layers=2, resident_layers=frozenset(range(num_resident)),
        device_bytes={use: number * MIB for use, number in uses.items()}, device_budget_bytes=memory * MIB,
    )  # fmt: skip
    assert most_kept_bytes(placement, num_texts=4) == most * MIB
