"""GGML's blocks are the numbers that the gguf library makes of them, bit for bit (`scripts.make.gguf_blocks`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload.formats.gguf_blocks import TYPES

GIVEN = load_file(Path(__file__).with_name("gguf_blocks.safetensors"))


@pytest.mark.parametrize("name", TYPES)
def test_blocks_are_the_numbers_of_the_gguf_library(name: str) -> None:
    kind, blocks, expected = TYPES[name], GIVEN[f"{name}.blocks"], GIVEN[f"{name}.numbers"]
    assert blocks.shape == (len(expected), kind.num_bytes)
    assert expected.shape[1] == kind.weights
    found = torch.empty_like(expected)
    kind.unpack(blocks, found)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
