"""The bytes that an estimate says a card moves to unpack a weight are those of torch's operations, counted."""

import pytest
import torch

from edgespec.placement.traffic import TRAFFIC_BYTES
from offload.checkpoint import TensorEntry
from offload.formats.bitsandbytes_int8 import INT8
from offload.formats.gguf import GGUF
from offload.formats.gguf_blocks import TYPES
from offload.formats.storage import PackedStorage, StoredParameter
from offload.layouts.int4 import INT4
from tests.support.launches import Traffic
from tests.support.pretend_cuda import pretend_cuda

ROWS, COLUMNS = 64, 1024
GGUF_TYPES = [name for name, kind in TYPES.items() if not kind.is_unpacked]


def packed(name: str) -> tuple[PackedStorage, dict[str, torch.Tensor]]:
    """A random matrix."""
    for form in (INT4, INT8):
        if form.name == name:
            return form.pack(torch.randn(ROWS, COLUMNS).bfloat16())
    kind = TYPES[name]
    blocks = torch.randint(256, (ROWS, COLUMNS // kind.weights * kind.num_bytes)).to(torch.uint8)
    leaf = f"p.gguf_{name.lower()}"
    pieces = (TensorEntry.planned(leaf, tuple(blocks.shape), torch.uint8),)
    packing = GGUF.detect(StoredParameter(name="p.weight", shape=(ROWS, COLUMNS), stored={leaf: pieces}, stated={}))
    assert packing is not None
    return packing, {"blocks": blocks}


@pytest.mark.parametrize("name", [*GGUF_TYPES, "int4", "int8"])
def test_traffic_is_what_the_operations_of_a_format_move(name: str) -> None:
    packing, parts = packed(name)
    with pretend_cuda():
        there = {part: tensor.cuda() for part, tensor in parts.items()}
        out = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda")
        packing.unpack(there, out)  # makes the tables
        with Traffic() as traffic:
            packing.unpack(there, out)
    assert packing.name == name
    assert traffic.num_bytes / out.numel() == pytest.approx(TRAFFIC_BYTES[name], rel=0.03)
