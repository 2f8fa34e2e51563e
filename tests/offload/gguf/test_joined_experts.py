"""Experts whose gate and up are one tensor in a file, as newer converters write them, or two, as older ones did."""

from pathlib import Path

import torch

from offload.gguf.header import TextList, read_gguf
from tests.offload.gguf.files import write_gguf
from tests.offload.gguf.test_tiny_models import TINY, weights

JOINED = "ffn_gate_up_exps"


def test_two_tensors_are_the_same_experts_as_one(tmp_path: Path) -> None:
    header = read_gguf(TINY / "gemma4moe.gguf")
    stored = header.path.read_bytes()
    settings = {key: value.read() if isinstance(value, TextList) else value for key, value in header.settings.items()}
    tensors = []
    for tensor in header.tensors.values():
        numbers = stored[tensor.offset : tensor.offset + tensor.num_bytes]
        if JOINED not in tensor.name:
            tensors.append((tensor.name, tensor.shape, tensor.block.number, numbers))
            continue
        both = torch.frombuffer(bytearray(numbers), dtype=torch.float32).view(tensor.shape)  # [experts, rows, h]
        for part, half in zip(("ffn_gate_exps", "ffn_up_exps"), both.chunk(2, dim=1), strict=True):
            content = half.contiguous().numpy().tobytes()
            tensors.append((tensor.name.replace(JOINED, part), tuple(half.shape), tensor.block.number, content))
    found, expected = weights(write_gguf(tmp_path / "a.gguf", settings, tensors)), weights(header.path)
    assert len(tensors) > len(header.tensors)
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
