"""GGML's blocks are the numbers that the gguf library makes of them, bit for bit (`scripts.make.gguf_blocks`)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload.checkpoint import TensorEntry
from offload.formats.gguf import GGUF
from offload.formats.gguf_blocks import TYPES
from offload.formats.storage import StoredParameter
from offload.layouts.int4 import INT4_LAYOUT
from offload.layouts.int4_lanes import LANES

CPU = torch.device("cpu")
GIVEN = load_file(Path(__file__).with_name("gguf_blocks.safetensors"))


def test_blocks_are_the_numbers_of_the_gguf_library() -> None:
    for name, kind in TYPES.items():
        blocks, expected = GIVEN[f"{name}.blocks"], GIVEN[f"{name}.numbers"]
        assert blocks.shape == (len(expected), kind.num_bytes), name
        assert expected.shape[1] == kind.weights, name
        found = torch.empty_like(expected)
        kind.unpack(blocks, found)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), name


@pytest.mark.parametrize("name", [name for name, kind in TYPES.items() if kind.read_even])
@pytest.mark.parametrize("num_heads", [None, 2], ids=["rows", "heads"])
def test_even_steps_are_the_same_weights_which_int4_keeps(name: str, num_heads: int | None) -> None:
    """In a Llama's order of heads, and with a group whose weights are all equal, which has no scale."""
    kind, rows, columns = TYPES[name], 64, 256
    given = GIVEN[f"{name}.blocks"]
    blocks = given[torch.arange(rows * columns // kind.weights) % len(given)].clone()
    moderate = torch.tensor([0.02, 0.3], dtype=torch.float16).view(torch.uint8)  # scale, minimum: no outliers
    blocks[:, : len(moderate) if name != "Q4_0" else 2] = moderate[: None if name != "Q4_0" else 2]
    blocks.view(rows, -1)[5, :2] = 0
    stored_shape = (
        (rows, -1) if num_heads is None else (num_heads, rows // num_heads, columns // kind.weights * kind.num_bytes)
    )
    stored = blocks.view(stored_shape)
    leaf = f"p.gguf_{name.lower()}"
    pieces = (TensorEntry.planned(leaf, tuple(stored.shape), torch.uint8),)
    parameter = StoredParameter(name="p.weight", shape=(rows, columns), stored={leaf: pieces}, stated={})
    packing = GGUF.detect(parameter)
    exact, found = torch.empty(rows, columns), torch.empty(rows, columns)
    packing.unpack({"blocks": stored}, exact)
    steps = packing.even_steps.read({"blocks": stored})
    groups = steps.numbers.view(rows, -1, 32) - steps.zeros.view(rows, -1, 1)
    assert torch.allclose(
        (groups * steps.scale.view(rows, -1, 1)).view(rows, -1), exact, rtol=1e-5, atol=1e-4 * exact.std()
    )
    kept = INT4_LAYOUT.repacked(packing, (rows, columns), None)
    kept.storage.unpack(kept.repack("p.weight", {"blocks": stored}), found)
    assert (found - exact).norm() / exact.norm() < 2**-8
    if name == "Q4_0" and LANES.runs_on(CPU):  # whose scales are kept as they are
        assert torch.equal(found, exact)
