"""Packed weights outside of the layers: a table of embeddings gives rows, and a head multiplies few weights at a time.

Both may be the same weight, and both are as large as many layers: neither is ever unpacked whole.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.formats.published import weights_at_once
from offload.formats.storage import UnpackSome, rows_at_once
from offload.layouts.layout import Kernel
from offload.layouts.onednn import multiply
from offload.packed_weight import PackedModule, PackedWeight


class PackedTable(PackedModule):
    """An embedding; its rows are unpacked as they are looked up."""

    def num_unpacked(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many weights are unpacked at once, beside the rows of a pass."""
        return 0 if self._unpack_some else super().num_unpacked(dtype, device)

    def is_unpacked(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether every pass needs all of the weight unpacked."""
        return self._unpack_some is None and super().is_unpacked(dtype, device)

    def hook(self, scratch: Tensor, undo: ExitStack, *, is_apart: Callable[..., bool] | None = None) -> None:
        """Hook the module, so that every forward looks up rows that are unpacked for it, until `undo` is closed."""
        unpack_some = self._unpack_some
        if unpack_some is None:
            super().hook(scratch, undo, is_apart=is_apart)
            return
        ((attribute, packed),) = self.weights
        parameters: dict[str, Any] = self.module._parameters
        parts: Any = packed._parameters
        # It has the weight's shape, device and dtype, which others look at, and no memory.
        nothing = torch.full((1, 1), torch.nan, dtype=scratch.dtype, device=scratch.device).expand(packed.shape)
        between = nn.Parameter(nothing, requires_grad=False)
        undo.callback(parameters.__setitem__, attribute, parameters[attribute])
        parameters[attribute] = between
        module: Any = self.module
        undo.callback(setattr, module, "padding_idx", module.padding_idx)
        module.padding_idx = None  # which counts among all rows, for gradients alone

        def unpack(_module: nn.Module, arguments: Any) -> Any:
            ids, *others = arguments
            rows = torch.empty(ids.numel(), packed.shape[-1], dtype=scratch.dtype, device=scratch.device)
            parameters[attribute] = nn.Parameter(unpack_some(parts, ids.reshape(-1), rows), requires_grad=False)
            return torch.arange(ids.numel(), device=ids.device).view(ids.shape), *others

        def let_go(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            parameters[attribute] = between

        undo.callback(self.module.register_forward_pre_hook(unpack).remove)
        undo.callback(self.module.register_forward_hook(let_go, always_call=True).remove)

    @property
    def _unpack_some(self) -> UnpackSome | None:
        (_, packed), *others = self.weights
        return None if others else packed.packing.unpack_some


class PackedHead(PackedModule):
    """A head; where no kernel multiplies it as it is packed, some of its rows are unpacked at a time."""

    def __init__(self, module: nn.Module, weights: list[tuple[str, PackedWeight]]) -> None:
        super().__init__(module, weights)
        ((_, self._packed),) = weights

    def num_unpacked(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many weights are unpacked at once, beside those whose temporaries exist together."""
        return 0 if self._packed.packing.unpack_some else super().num_unpacked(dtype, device)

    def hook(self, scratch: Tensor, undo: ExitStack, *, is_apart: Callable[..., bool] | None = None) -> None:
        """Let the module multiply the packed weight, until `undo` is closed."""
        unpack_some, kernel = self._packed.packing.unpack_some, self.kernel(scratch.dtype, scratch.device)
        if unpack_some is None:
            super().hook(scratch, undo, is_apart=is_apart)
            return
        chunks = partial(multiply_in_chunks, unpack_some, self._packed.shape[0])
        is_on_cpu = scratch.device.type == "cpu"  # where texts in company have the bits that they have alone

        def multiply_some(parts: Mapping[str, Any], rows: Tensor, bias: Tensor | None) -> Tensor:
            is_multiplied = kernel is not None and (is_on_cpu or kernel.takes(rows))
            return (kernel.product if kernel is not None and is_multiplied else chunks)(parts, rows, bias)

        native = None if kernel is None else kernel.native
        self._multiply_packed(Kernel(multiply=multiply_some, native=native), self._packed._parameters)
        undo.callback(self._forget_kernel)

    def offer_rows(self, dtype: torch.dtype, device: torch.device, undo: ExitStack) -> None:
        """Let the module give some rows of its weight by `weight_rows`, until `undo` is closed."""
        module: Any = self.module
        module.weight_rows = partial(self._rows, dtype, device)
        undo.callback(delattr, module, "weight_rows")

    def _rows(self, dtype: torch.dtype, device: torch.device, which: slice) -> Tensor:
        packed, unpack_some = self._packed, self._packed.packing.unpack_some
        if unpack_some is None:
            return packed.unpack(torch.empty(packed.shape, dtype=dtype, device=device))[which]
        start, end, _ = which.indices(packed.shape[0])
        parts: Mapping[str, Any] = packed._parameters
        return unpack_some(
            parts, slice(start, end), torch.empty(end - start, packed.shape[1], dtype=dtype, device=device)
        )


def multiply_in_chunks(
    unpack_some: UnpackSome, num_rows: int, parts: Mapping[str, Any], rows: Tensor, bias: Tensor | None
) -> Tensor:
    """Return rows [..., i] times a packed weight [r, i], of which some rows are unpacked at a time."""
    columns = rows.shape[-1]
    at_once = rows_at_once(weights_at_once(rows.device), columns)
    product = rows.new_empty(*rows.shape[:-1], num_rows)
    scratch = rows.new_empty(at_once, columns)
    for start in range(0, num_rows, at_once):
        end = min(start + at_once, num_rows)
        weight = unpack_some(parts, slice(start, end), scratch[: end - start])
        product[..., start:end] = multiply(rows, weight, None if bias is None else bias[start:end])
    return product
