"""Packed weights are parameters of the modules that compute with them, and are unpacked there.

A module keeps its own forward: its quantised parameters are unpacked into scratch memory just
before it runs, and let go after. So linear layers, GPT-2's transposed ones and fused experts are
all treated the same, and the packed bytes and scales are parameters like any other, which stream. Each
row of a result depends on that row alone (activations are not quantised), as a tree needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.formats.bitsandbytes_4bit import Bitsandbytes4Bit
from offload.formats.packed_format import Packing

FEW_ROWS = 4  # so many bitsandbytes multiplies with the packed weight itself on every card, and faster than unpacked


class Removable(Protocol):
    """What undoes a change."""

    def remove(self) -> None:
        """Undo it."""


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

    def hook(self, scratch: Tensor, *, few_rows: int = 0) -> list[Removable]:
        """Hook the module, so that every forward unpacks its weights into `scratch`.

        A linear layer whose format can do so multiplies `few_rows` and fewer with the packed weight instead.
        """
        places, start = [], 0
        for attribute, packed in self.weights:
            end = start + math.prod(packed.shape)
            places.append((attribute, packed, scratch[start:end].view(packed.shape)))
            start = end
        parameters = self.module._parameters
        on_meta = {attribute: parameters[attribute] for attribute, _ in self.weights}

        fused = self._fused() if few_rows else None

        def unpack(_module: nn.Module, arguments: Any) -> None:
            if fused is not None and _num_rows(arguments[0]) <= few_rows:
                return
            for attribute, packed, place in places:
                parameters[attribute] = nn.Parameter(packed.unpack(place), requires_grad=False)

        def let_go(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            parameters.update(on_meta)

        handles: list[Removable] = [
            self.module.register_forward_pre_hook(unpack),
            self.module.register_forward_hook(let_go, always_call=True),
        ]
        return handles if fused is None else [*handles, _replace_forward(self.module, fused)]

    def _fused(self) -> Callable[[Tensor], Tensor] | None:
        """Return what a linear layer does with its packed weight, where the weight's format can do so."""
        (_, packed), *others = self.weights
        module, packing, parts = self.module, packed.packing, packed._parameters
        if others or type(module) is not nn.Linear or not isinstance(packing, Bitsandbytes4Bit):
            return None
        if not packing.multiplies(packed.shape):
            return None
        return lambda rows: packing.multiply(parts, packed.shape, rows, module.bias)


class _Forward:
    """A module's own forward, which comes back when this is removed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def remove(self) -> None:
        del self._module.forward


def _replace_forward(module: nn.Module, fused: Callable[[Tensor], Tensor]) -> _Forward:
    """Let a linear layer compute by `fused` while its weight is not unpacked, until the result is removed."""
    whole = module.forward

    def forward(rows: Tensor) -> Tensor:
        return fused(rows) if module.weight.is_meta else whole(rows)

    module.forward = forward
    return _Forward(module)


def _num_rows(rows: Tensor) -> int:
    return rows.numel() // rows.shape[-1]
