"""Weights rounded to AWQ's form mean what they were, to half a step."""

import torch

from scripts.bench.formats import found
from scripts.make.awq import GROUP, rounded


def test_rounded_weights_are_within_half_a_step_of_the_given_ones() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 2 * GROUP) * torch.linspace(0.1, 3, 2 * GROUP)
    packing, parts = found({"quant_method": "awq"}, rounded(weight), (16, 2 * GROUP))
    unpacked = torch.empty(16, 2 * GROUP)
    packing.unpack(parts, unpacked)
    steps = parts["scales"].float().repeat_interleave(GROUP, 0).T  # [rows, columns]
    assert ((unpacked - weight).abs() <= 0.51 * steps + 1e-3).all()
