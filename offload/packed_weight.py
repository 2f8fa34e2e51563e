"""Packed weights are parameters of the modules that compute with them, and are unpacked there.

A module keeps its own forward: its quantised parameters are unpacked into scratch memory just
before it runs, and let go after. So linear layers, GPT-2's transposed ones and fused experts are
all treated the same, and the packed bytes and scales are parameters like any other, which stream. Each
row of a result depends on that row alone (activations are not quantised), as a tree needs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offload.formats.packed_format import Packing


class PackedWeight(nn.Module):
    """One weight's packed parts, as parameters."""

    def __init__(self, shape: tuple[int, ...], packing: Packing) -> None:
        super().__init__()
        self.shape = shape
        self.packing = packing
        for part, (part_shape, dtype) in packing.part_shapes(shape).items():
            empty = torch.empty(part_shape, dtype=dtype, device="meta")
            self.register_parameter(part, nn.Parameter(empty, requires_grad=False))

    def unpack(self, out: Tensor) -> Tensor:
        """Return the weight, written to `out`."""
        parts: Any = self._parameters
        return self.packing.unpack(parts, out)


class PackedModule:
    """A module whose parameters `weights` are packed; each is an attribute and its packed form."""

    def __init__(self, module: nn.Module, weights: list[tuple[str, PackedWeight]]) -> None:
        self.module = module
        self.weights = weights

    def num_unpacked(self) -> int:
        """Return how many weights are unpacked at once."""
        return sum(math.prod(packed.shape) for _, packed in self.weights)

    def hook(self, scratch: Tensor) -> list[RemovableHandle]:
        """Hook the module, so that every forward unpacks its weights into `scratch`."""
        places, start = [], 0
        for attribute, packed in self.weights:
            end = start + math.prod(packed.shape)
            places.append((attribute, packed, scratch[start:end].view(packed.shape)))
            start = end
        parameters = self.module._parameters
        on_meta = {attribute: parameters[attribute] for attribute, _ in self.weights}

        def unpack(_module: nn.Module, _arguments: Any) -> None:
            for attribute, packed, place in places:
                parameters[attribute] = nn.Parameter(packed.unpack(place), requires_grad=False)

        def let_go(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            parameters.update(on_meta)

        return [
            self.module.register_forward_pre_hook(unpack),
            self.module.register_forward_hook(let_go, always_call=True),
        ]
