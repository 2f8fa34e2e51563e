"""Rows, their experts and the sums of what those make: beside the definition, one row after the other."""

from collections.abc import Generator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from offload.experts.expert_group import ExpertWeight
from offload.experts.expert_source import HandedExpert
from offload.experts.mixture import mix

NUM_EXPERTS, HIDDEN, INNER = 6, 32, 64
NO_EXPERT = NUM_EXPERTS  # and any greater number


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


MODULE: Any = SimpleNamespace(num_experts=NUM_EXPERTS, has_gate=True, has_bias=False, _apply_gate=gated)


@pytest.fixture
def experts() -> list[tuple[Tensor, Tensor]]:
    shapes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    return [tuple(torch.randn(shape) * 0.2 for shape in shapes) for _ in range(NUM_EXPERTS)]


def last_first(experts: list[tuple[Tensor, Tensor]], rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
    for number in sorted(rows_of, reverse=True):
        weights = {
            name: ExpertWeight(blocks=partial(list, [weight]), dtype=torch.float32, is_transposed=False)
            for name, weight in zip(("gate_up_proj", "down_proj"), experts[number], strict=True)
        }
        yield HandedExpert(number=number, weights=weights, device=torch.device("cpu"))


@pytest.mark.parametrize("chosen", [
    [[4, 1]], [[1, 4], [4, 0], [5, 1]],
    [[NO_EXPERT, 3]], [[NO_EXPERT + 1, 2, NO_EXPERT + 1, 0]], [[NO_EXPERT] * 2], [[0, NO_EXPERT], [NO_EXPERT, 5]],
], ids=str)  # fmt: skip
def test_a_row_gets_the_weighted_sum_of_what_its_experts_make_of_it(
    chosen: list[list[int]], experts: list[tuple[Tensor, Tensor]]
) -> None:
    rows, shares = torch.randn(len(chosen), HIDDEN), torch.rand(len(chosen), len(chosen[0]))
    found = mix(MODULE, partial(last_first, experts), rows, torch.tensor(chosen), shares)
    expected = torch.zeros(len(chosen), HIDDEN)
    for row, numbers in enumerate(chosen):
        for place, number in enumerate(numbers):
            if number < NO_EXPERT:
                first, down = experts[number]
                expected[row] += shares[row, place] * linear(gated(linear(rows[row], first)), down)
    torch.testing.assert_close(found, expected)


def test_every_expert_is_requested_once_with_the_number_of_its_rows(experts: list[tuple[Tensor, Tensor]]) -> None:
    requests: list[dict[int, int]] = []

    def noted(rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
        requests.append(dict(rows_of))
        yield from last_first(experts, rows_of)

    for chosen in ([[2, 0]], [[2, 0], [NO_EXPERT, 2], [2, 5]]):
        mix(MODULE, noted, torch.randn(len(chosen), HIDDEN), torch.tensor(chosen), torch.rand(len(chosen), 2))
    assert requests == [{2: 1, 0: 1}, {2: 3, 0: 1, 5: 1}]
