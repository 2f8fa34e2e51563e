"""Packed weights that no kernel multiplies are unpacked once, where memory allows, and not in each pass.

That is the memory beside all that is resident as it is packed, for the head first, then for layers. Drafts run most
often, and theirs are planned with them. Weights that a compute layout takes at load are put in that instead: in a slow
one, with which several rows take longer, only where memory does not suffice for the numbers of the run.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload.allocated import allocated_bytes
from offload.layer_store import LayerRecord
from offload.layouts.at_load import LayoutAtLoad
from offload.layouts.onednn import has_onednn, in_kernel_order, takes_kernel_order
from offload.packed_outside import PackedHead, PackedTable
from offload.packed_weight import PART_BYTES, PackedModule, unpacked_rows
from offload.placement import Placement
from offload.skeleton import Skeleton

LABEL = "weights unpacked when loaded"


def packed_outside(skeleton: Skeleton) -> list[PackedModule]:
    """Return the modules with packed weights that are a table of embeddings, or the head."""
    return [packed for packed in skeleton.packed if isinstance(packed, PackedTable | PackedHead)]


def packed_for_others(skeleton: Skeleton) -> list[PackedModule]:
    """Return those that other models borrow: not Gemma's table of all layers' inputs."""
    table = skeleton.model.get_input_embeddings()
    return [one for one in packed_outside(skeleton) if one.module is table or isinstance(one, PackedHead)]


def unpacked_modules(skeleton: Skeleton, record: LayerRecord, device: torch.device) -> list[PackedModule]:
    """Return the modules of a record whose weights each pass would unpack, or have a layout at load.

    On a card these are heads, and layers' weights that have a layout at load.
    """
    dtype, is_outside = skeleton.model.dtype, record.index == skeleton.outside.index
    owners = {skeleton.model.get_submodule(_owner(name)) for name in record.tensors}
    modules = [
        packed
        for packed in skeleton.unpacked_whole(device)
        if packed.module in owners or (is_outside and isinstance(packed, PackedHead))
    ]
    keeps_others = device.type != "cpu" and not is_outside
    if keeps_others and not record.tensors.keys().isdisjoint(skeleton.ties.values()):
        return []  # a layout takes the place of what another layer reads as it is stored
    return [
        packed
        for packed in modules
        if layout_when_loaded(skeleton, packed, device) is not None
        or (packed.is_unpacked(dtype, device) and not keeps_others)
    ]


def layout_when_loaded(
    skeleton: Skeleton, packed: PackedModule, device: torch.device, *, in_slow_layouts: bool = True
) -> LayoutAtLoad | None:
    """Return the layout that a weight is put in when it is loaded; None where it stays as it is, or is unpacked.

    A head on a card has none: it would take the place of the head's numbers, of which drafts are given rows.
    """
    may_be_put = skeleton.may_repack and not (device.type != "cpu" and isinstance(packed, PackedHead))
    found = packed.layout_at_load(skeleton.model.dtype, device) if may_be_put else None
    return None if found is None or (found.layout.is_slow and not in_slow_layouts) else found


def share_when_loaded(skeleton: Skeleton, dtype: torch.dtype, device: torch.device) -> float:
    """Return the share of the layers' weights that a kernel multiplies as they are packed, or in a layout at load."""
    inside = {module for layer in skeleton.layers for module in layer.modules()}
    packed = [one for one in skeleton.packed if one.module in inside]
    multiplied = [one for one in packed if one.kernel(dtype, device) or layout_when_loaded(skeleton, one, device)]
    parameters = [pair for layer in skeleton.layers for pair in layer.named_parameters()]
    return sum(one.num_weights for one in multiplied) / sum(
        parameter.numel() for name, parameter in parameters if "_packed." not in name
    )


def added_bytes(
    skeleton: Skeleton, records: Iterable[LayerRecord], device: torch.device, *, in_slow_layouts: bool = False
) -> int:
    """Return the bytes that records take more once their weights are unpacked; what a file holds of them may go.

    A card has no file of them: there the packed weights stay.
    `in_slow_layouts`: those that have a slow layout are put in that instead.
    """
    modules = [module for record in records for module in unpacked_modules(skeleton, record, device)]
    return _added_bytes(skeleton, modules, device, in_slow_layouts=in_slow_layouts)


def _added_bytes(
    skeleton: Skeleton, modules: Sequence[PackedModule], device: torch.device, *, in_slow_layouts: bool
) -> int:
    dtype = skeleton.model.dtype
    if device.type != "cpu":
        layouts = [layout_when_loaded(skeleton, module, device) for module in modules]
        return sum(
            layout.added_bytes_on_card if layout else allocated_bytes(module.num_weights * dtype.itemsize)
            for module, layout in zip(modules, layouts, strict=True)
        )
    tables = {packed.weights[0][1] for packed in packed_outside(skeleton) if isinstance(packed, PackedTable)}
    stored_bytes = sum(weight.num_bytes for module in modules for _, weight in module.weights if weight not in tables)
    layouts = [layout_when_loaded(skeleton, module, device, in_slow_layouts=in_slow_layouts) for module in modules]
    num_bytes = (
        layout.num_bytes if layout else module.num_weights * dtype.itemsize
        for module, layout in zip(modules, layouts, strict=True)
    )
    return sum(num_bytes) - stored_bytes


def with_unpacked(placement: Placement, skeleton: Skeleton, device: torch.device) -> Placement:
    """Return the placement with as many weights unpacked when they are loaded as fit beside all layers.

    First all are multiplied in some layout, the smallest; then those in slow ones are unpacked in the memory left.
    """
    if not placement.is_resident:
        return placement
    records = (skeleton.outside, *skeleton.records)
    by_record = {record.index: unpacked_modules(skeleton, record, device) for record in records}
    passing_bytes = [_passing_bytes(one, skeleton.model.dtype) for modules in by_record.values() for one in modules]
    free_bytes = placement.device_budget_bytes - placement.planned_bytes - max(passing_bytes, default=0)
    chosen: dict[int, int] = {}
    slow: set[int] = set()
    for is_first in (True, False):
        for index, modules in by_record.items():
            num_bytes = _added_bytes(skeleton, modules, device, in_slow_layouts=is_first)
            more_bytes = num_bytes - chosen.get(index, 0)
            # A layout may be as large as what is stored, or smaller: that of GGUF's Q4_1 is to the byte.
            if modules and more_bytes <= free_bytes:
                chosen[index] = num_bytes
                free_bytes -= more_bytes
                (slow.add if is_first else slow.discard)(index)
    if not chosen:
        return placement
    device_bytes = {**placement.device_bytes, LABEL: sum(chosen.values())}
    return replace(placement, unpacked=frozenset(chosen), slow=frozenset(slow), device_bytes=device_bytes)


def lent_bytes(skeleton: Skeleton, *, lends: bool) -> int:
    """Return what table and head take beside their packed parts: nothing, but where they are lent, and whole."""
    if not lends:
        return 0
    weights = {weight for packed in packed_for_others(skeleton) for _, weight in packed.weights}
    return sum(math.prod(weight.shape) for weight in weights) * skeleton.model.dtype.itemsize


def unpack_now(
    skeleton: Skeleton,
    modules: Iterable[PackedModule],
    device: torch.device,
    undo: ExitStack,
    *,
    in_slow_layouts: bool = False,
) -> None:
    """Unpack the weights of modules, which are no longer hooked, until `undo` is closed: linear ones for oneDNN.

    Those that have a layout are put in that, but with `in_slow_layouts` alone in slow ones.
    """
    model, dtype = skeleton.model, skeleton.model.dtype
    names = {module: name for name, module in model.named_modules()}
    for packed in modules:
        layout = layout_when_loaded(skeleton, packed, device, in_slow_layouts=in_slow_layouts)
        if layout is not None:
            packed.put_in(layout, undo)
            continue
        module: Any = packed.module
        for attribute, weight in packed.weights:
            is_ordered = device.type == "cpu" and has_onednn(dtype)
            if is_ordered and takes_kernel_order(model, f"{names[module]}.{attribute}"):
                module.kernel_order = [in_kernel_order(part) for part in unpacked_rows(weight, dtype)]
                undo.callback(delattr, module, "kernel_order")
            else:
                whole = weight.unpack(torch.empty(weight.shape, dtype=dtype, device=device))
                _put(module, attribute, nn.Parameter(whole, requires_grad=False), undo)


def _passing_bytes(module: PackedModule, dtype: torch.dtype) -> int:
    """Return the most bytes that a module's weights take beside their own, while they are put in an order."""
    return max(
        min(math.prod(weight.shape) * dtype.itemsize, sys.maxsize if weight.packing.unpack_some is None else PART_BYTES)
        for _, weight in module.weights
    )


def unpack_for_others(skeleton: Skeleton, device: torch.device, undo: ExitStack) -> None:
    """Unpack table and head whole, for models that borrow them, until `undo` is closed: once, where they are one."""
    whole: dict[nn.Module, nn.Parameter] = {}
    for packed in packed_for_others(skeleton):
        for attribute, weight in packed.weights:
            if weight not in whole:
                found = torch.empty(weight.shape, dtype=skeleton.model.dtype, device=device)
                whole[weight] = nn.Parameter(weight.unpack(found), requires_grad=False)
            _put(packed.module, attribute, whole[weight], undo)


def _put(module: nn.Module, attribute: str, parameter: nn.Parameter, undo: ExitStack) -> None:
    undo.callback(module._parameters.__setitem__, attribute, module._parameters[attribute])
    module._parameters[attribute] = parameter


def _owner(name: str) -> str:
    """Return the module that a parameter, or a part of a packed one, belongs to."""
    return name.rpartition("_packed.")[0].rpartition(".")[0] or name.rpartition(".")[0]
