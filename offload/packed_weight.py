"""Packed weights are parameters of the modules that compute with them, and are unpacked there.

A module keeps its own forward: its quantised parameters are unpacked into scratch memory just
before it runs, and let go after. So linear layers, GPT-2's transposed ones and fused experts are
all treated the same, and the packed bytes and scales are parameters like any other, which stream. Each
row of a result depends on that row alone (activations are not quantised), as a tree needs.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.formats.known import packing_of
from offload.formats.packed_format import Kernel, Packing, cannot_be_used
from offload.stored_names import Pieces


class PackedWeight(nn.Module):
    """One weight's packed parts, as parameters."""

    def __init__(self, shape: tuple[int, ...], packing: Packing) -> None:
        super().__init__()
        self.shape = shape
        self.packing = packing
        for part, (part_shape, dtype) in packing.part_shapes(shape).items():
            empty = torch.empty(part_shape, dtype=dtype, device="meta")
            self.register_parameter(part, nn.Parameter(empty, requires_grad=False))

    @property
    def num_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parameters())

    def unpack(self, out: Tensor) -> Tensor:
        """Return the weight, written to `out`."""
        parts: Any = self._parameters
        return self.packing.unpack(parts, out)


class PackedModule:
    """A module whose parameters `weights` are packed; each is an attribute and its packed form."""

    def __init__(self, module: nn.Module, weights: list[tuple[str, PackedWeight]]) -> None:
        self.module = module
        self.weights = weights

    @property
    def num_weights(self) -> int:
        """The number of weights that stand packed."""
        return sum(math.prod(packed.shape) for _, packed in self.weights)

    def num_unpacked(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many weights are unpacked at once; none where a kernel takes any number of rows."""
        return self.num_weights if self._unpacks(self.kernel(dtype, device)) else 0

    def hook(self, scratch: Tensor, undo: ExitStack, *, is_apart: Callable[..., bool] | None = None) -> None:
        """Hook the module, so that every forward unpacks its weights into `scratch`, until `undo` is closed.

        Forwards of arguments that `is_apart` unpack nothing.
        A linear layer whose format has a kernel for it multiplies few rows, or any number, with the packed weight.
        """
        kernel = self.kernel(scratch.dtype, scratch.device)
        if kernel is not None:
            self._multiply_packed(kernel)
            undo.callback(delattr, self.module, "forward")
        if self._unpacks(kernel):
            max_rows = 0 if kernel is None else kernel.max_rows
            self._unpack_into(
                scratch, undo, is_apart or (lambda rows, *_: max_rows > 0 and _num_rows(rows) <= max_rows)
            )

    @staticmethod
    def _unpacks(kernel: Kernel | None) -> bool:
        """Return whether there are passes that unpack a weight that has this kernel."""
        return kernel is None or kernel.max_rows < sys.maxsize

    def _unpack_into(self, scratch: Tensor, undo: ExitStack, is_apart: Callable[..., bool]) -> None:
        """Hook the module, so that a forward unpacks its weights, unless its arguments are apart."""
        places, start = [], 0
        for attribute, packed in self.weights:
            end = start + math.prod(packed.shape)
            places.append((attribute, packed, scratch[start:end].view(packed.shape)))
            start = end
        parameters = self.module._parameters
        on_meta = {attribute: parameters[attribute] for attribute, _ in self.weights}

        def unpack(_module: nn.Module, arguments: Any) -> None:
            if is_apart(*arguments):
                return
            for attribute, packed, place in places:
                parameters[attribute] = nn.Parameter(packed.unpack(place), requires_grad=False)

        def let_go(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            parameters.update(on_meta)

        undo.callback(self.module.register_forward_pre_hook(unpack).remove)
        undo.callback(self.module.register_forward_hook(let_go, always_call=True).remove)

    def kernel(self, dtype: torch.dtype, device: torch.device) -> Kernel | None:
        """Return a linear layer's product with its packed weight, where the weight's format has one."""
        (_, packed), *others = self.weights
        if others or type(self.module) is not nn.Linear:
            return None
        return packed.packing.kernel(packed.shape, dtype, device)

    def _multiply_packed(self, kernel: Kernel) -> None:
        """Let a linear layer compute by the kernel while its weight is not unpacked."""
        module, parts, whole = self.module, self.weights[0][1]._parameters, self.module.forward

        def forward(rows: Tensor) -> Tensor:
            unpacked, bias = (module._parameters[name] for name in ("weight", "bias"))
            if unpacked is not None and unpacked.is_meta:
                return kernel.multiply(parts, rows, bias)
            product: Tensor = whole(rows)
            return product

        module.forward = forward


def attach_packed_weights(
    model: PreTrainedModel,
    stored: dict[str, Pieces],
    ties: dict[str, str],
    stated: Mapping[str, Any],
    unread: frozenset[str] = frozenset(),
) -> tuple[tuple[PackedModule, ...], set[str]]:
    """Give every quantised parameter's module its packed parts, and put them into `stored` by name.

    `stated` is what config.json says of the packing. Returns the modules, and the names of the parameters that are
    packed. Raises CheckpointError for a packing that is not understood.
    """
    by_module: dict[str, list[tuple[str, PackedWeight]]] = defaultdict(list)
    names = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        shape = tuple(parameter.shape)
        packing = packing_of(name, shape, stored, stated) if name not in ties and name not in unread else None
        if packing is None:
            continue
        if name in ties.values():
            raise cannot_be_used(name, "another parameter is tied to it")
        names.add(name)
        module_name, _, attribute = name.rpartition(".")
        packed = PackedWeight(shape, packing)
        model.get_submodule(module_name).add_module(f"{attribute}_packed", packed)
        by_module[module_name].append((attribute, packed))
        for part, stored_name in packing.stored_names(name).items():
            if stored_name in stored:  # missing parts are reported with all other tensors
                pieces = (replace(piece, is_transposed=False, is_in_turn=False) for piece in stored.pop(stored_name))
                stored[f"{module_name}.{attribute}_packed.{part}"] = tuple(pieces)  # whose order is the packing's
    modules = tuple(PackedModule(model.get_submodule(name), weights) for name, weights in by_module.items())
    return modules, names


def detach_packed_weights(modules: Iterable[PackedModule]) -> None:
    """Take from the modules the packed parts that `attach_packed_weights` gave them."""
    for packed in modules:
        for attribute, _ in packed.weights:
            delattr(packed.module, f"{attribute}_packed")


def _num_rows(rows: Tensor) -> int:
    return rows.numel() // rows.shape[-1]
