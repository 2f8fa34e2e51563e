"""The speeds of a machine are those of the products that layers are computed by."""

import pytest
import torch
from torch import Tensor

from edgespec.doctor import machine_speed
from offload.layouts import onednn
from offload.layouts.known import LAYOUTS, kernel_of

CPU = torch.device("cpu")
BOTH = (torch.float32, torch.bfloat16)


@pytest.mark.skipif(not all(map(onednn.has_onednn, BOTH)), reason="oneDNN does not multiply here")
def test_plain_and_packed_weights_are_multiplied_as_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate by torch's own products, which take twice as long in float32, promises too little."""
    multiplied: set[tuple[torch.dtype, int]] = set()
    product = onednn._product

    def counted(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        multiplied.add((rows.dtype, rows.shape[0]))
        return product(rows, weight, bias)

    monkeypatch.setattr(onednn, "_product", counted)
    for name, value in {
        "MATRIX": {"cpu": (64, 128)}, "PRODUCT": {"cpu": 64}, "PACKED": (64, 128), "UNCACHED_BYTES": 1, "BUDGET_S": 0.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(machine_speed, name, value)
    found = machine_speed.measure_speed(CPU)
    # A single row is multiplied as four by resident weights.
    assert multiplied >= {(dtype, rows) for dtype in BOTH for rows in (4, 64)}
    with_kernel = {
        layout.own.name for layout in LAYOUTS if kernel_of(layout.own, (64, 128), torch.bfloat16, CPU) is not None
    }
    assert found.kernels.keys() == with_kernel
