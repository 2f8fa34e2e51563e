"""Packed weights are parameters of the modules that compute with them, and are unpacked there.

A module keeps its own forward: its quantised parameters are unpacked into scratch memory just
before it runs, and let go after. So linear layers, GPT-2's transposed ones and fused experts are
all treated the same, and the packed bytes and scales are parameters like any other, which stream. Each
row of a result depends on that row alone (activations are not quantised), as a tree needs.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from offload.formats.storage import PackedStorage, rows_at_once
from offload.layouts.at_load import LayoutAtLoad, layout_at_load
from offload.layouts.known import kernel_of
from offload.layouts.layout import Kernel

PART_BYTES = 32 << 20  # of a weight that are unpacked at once, where its format unpacks some rows alone


class PackedWeight(nn.Module):
    """One weight's packed parts, as parameters."""

    def __init__(self, shape: tuple[int, ...], packing: PackedStorage) -> None:
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
    """A module whose parameters `weights` are packed; each is an attribute and its packed parts."""

    def __init__(
        self, module: nn.Module, weights: list[tuple[str, PackedWeight]], *, is_read_whole: bool = False
    ) -> None:
        """`is_read_whole`: others read the weight of a linear layer, which therefore stays as it is."""
        self.module = module
        self.weights = weights
        self.is_read_whole = is_read_whole

    @property
    def num_weights(self) -> int:
        """The number of weights that stand packed."""
        return sum(math.prod(packed.shape) for _, packed in self.weights)

    def num_unpacked(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many weights are unpacked at once; none where a kernel takes any number of rows."""
        return self.num_weights if self._unpacks(self.kernel(dtype, device)) else 0

    def is_unpacked(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether every pass needs the weights unpacked."""
        return self.kernel(dtype, device) is None

    def hook(self, scratch: Tensor, undo: ExitStack, *, is_apart: Callable[..., bool] | None = None) -> None:
        """Hook the module, so that every forward unpacks its weights into `scratch`, until `undo` is closed.

        Forwards of arguments that `is_apart` unpack nothing.
        A linear layer whose format has a kernel for it multiplies few rows, or any number, with the packed weight.
        """
        kernel = self.kernel(scratch.dtype, scratch.device)
        if kernel is not None:
            self._multiply_packed(kernel, self.weights[0][1]._parameters)
            undo.callback(self._forget_kernel)
        if self._unpacks(kernel):
            self._unpack_into(scratch, undo, is_apart or (lambda rows, *_: kernel is not None and kernel.takes(rows)))

    @staticmethod
    def _unpacks(kernel: Kernel | None) -> bool:
        """Return whether there are passes that unpack a weight that has this kernel."""
        return kernel is None or kernel.max_rows < sys.maxsize

    def _unpack_into(self, scratch: Tensor, undo: ExitStack, is_apart: Callable[..., bool]) -> None:
        """Hook the module, so that a forward unpacks its weights, unless its arguments are apart."""
        places, start = [], 0
        for attribute, packed in self.weights:
            end = start + math.prod(packed.shape)
            packed.packing.prepare(scratch.device, scratch.dtype)
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
        packed = self._multiplied
        return None if packed is None else kernel_of(packed.packing, packed.shape, dtype, device)

    def layout_at_load(self, dtype: torch.dtype, device: torch.device) -> LayoutAtLoad | None:
        """Return the layout that a linear layer's weight may be put in when it is loaded; None where it needs none.

        A slow one is for weights that no kernel multiplies as they are.
        """
        packed = self._multiplied
        found = None if packed is None else layout_at_load(packed.packing, packed.shape, dtype, device)
        is_better = found is not None and not (found.layout.is_slow and self.kernel(dtype, device) is not None)
        return found if is_better else None

    @property
    def _multiplied(self) -> PackedWeight | None:
        """The weight of a linear layer that nothing else reads: the one that a kernel may multiply."""
        (_, packed), *others = self.weights
        return None if others or type(self.module) is not nn.Linear or self.is_read_whole else packed

    def put_in(self, layout: LayoutAtLoad, undo: ExitStack) -> None:
        """Let a linear layer multiply its weight in this layout, which is made now, until `undo` is closed."""
        parts: Any = self.weights[0][1]._parameters
        is_on_cpu = next(iter(parts.values())).device.type == "cpu"
        self._multiply_packed(layout.kernel, layout.parts_of(parts) if is_on_cpu else layout.parts_on_card(parts))
        undo.callback(self._forget_kernel)

    def _forget_kernel(self) -> None:
        for name in ("forward", "native"):
            vars(self.module).pop(name, None)

    def _multiply_packed(self, kernel: Kernel, parts: Mapping[str, Any]) -> None:
        """Let a linear layer compute by the kernel while its weight is not unpacked."""
        module, whole = self.module, self.module.forward

        def forward(rows: Tensor) -> Tensor:
            unpacked, bias = (module._parameters[name] for name in ("weight", "bias"))
            if unpacked is not None and unpacked.is_meta:
                return kernel.product(parts, rows, bias)
            product: Tensor = whole(rows)
            return product

        module.forward = forward
        if kernel.native is not None:
            vars(module)["native"] = functools.partial(kernel.native, parts)


def weight_of(linear: nn.Module) -> Tensor:
    """Return the weight [out, in] of a linear layer that is read whole: unpacked now, if it is packed."""
    weight, packed = linear._parameters["weight"], linear._modules.get("weight_packed")
    assert weight is not None
    if not weight.is_meta or packed is None:
        return weight
    assert isinstance(packed, PackedWeight)
    device = next(packed.parameters()).device
    return packed.unpack(torch.empty(packed.shape, dtype=weight.dtype, device=device))


def unpacked_rows(weight: PackedWeight, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield rows of a weight [r, i] that follow each other, where its format unpacks some alone: else all of them."""
    num_rows, columns = weight.shape
    parts: Any = weight._parameters
    device = next(weight.parameters()).device
    unpack_some = weight.packing.unpack_some
    if unpack_some is None:
        yield weight.unpack(torch.empty(weight.shape, dtype=dtype, device=device))
        return
    at_once = rows_at_once(PART_BYTES // dtype.itemsize, columns)
    for start in range(0, num_rows, at_once):
        end = min(start + at_once, num_rows)
        yield unpack_some(parts, slice(start, end), torch.empty(end - start, columns, dtype=dtype, device=device))
