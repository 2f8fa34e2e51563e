"""The experts of a mixture that move on demand: their sizes from headers alone, and where a placement lets them wait.

Those that wait in RAM include those on the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from edgespec.model.layer_kinds import chosen_experts
from edgespec.placement.traffic import between_bytes
from edgespec.placement.weights import Weights
from offload.experts.expert_group import ExpertGroup
from offload.layer_store import LayerRecord
from offload.layouts.known import kernel_of
from offload.packed_weight import PackedModule
from offload.placement import ExpertPlacement
from offload.skeleton import Skeleton
from profiles.roofline import ExpertLoad, PackedLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSizes:
    """A mixture's layers in two parts: the experts, all of them kept, and the dense rest."""

    experts: ExpertLoad
    dense_bytes: tuple[int, ...]  # of each layer


def expert_modules(weights: Weights) -> tuple[str, ...]:
    """Return the names of the modules that hold all experts of a layer in one parameter; none where there are none."""
    model = weights.skeleton.model
    num_experts, _ = chosen_experts(model.config.get_text_config(decoder=True))
    names = {
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and parameter.shape[0] == num_experts
    }
    return tuple(f"{name}." for name in sorted(names))


def mixture_sizes(weights: Weights, device: torch.device) -> MixtureSizes | None:
    """Return the sizes of a model's decoder layers; None where there are no experts that a row could leave out."""
    skeleton = weights.skeleton
    num_experts, share = chosen_experts(skeleton.model.config.get_text_config(decoder=True))
    modules = expert_modules(weights)
    if num_experts is None or share >= 1 or not modules:
        return None
    on_demand = [
        record.without(frozenset(record.tensors) - _expert_names(record, modules)) for record in skeleton.records
    ]
    having = [record for record in on_demand if record.tensors]
    if not having:
        return None
    count = len(having) * num_experts
    packed = sum(module.num_weights for module in packed_modules(skeleton, modules, of_experts=True))
    plain = sum(math.prod(tensor.shape) for record in having for name, tensor in record.tensors.items()
                if "_packed." not in name and len(tensor.shape) > 2)  # fmt: skip
    unpacked_bytes = packed * weights.dtype.itemsize
    between = sum(
        between_bytes(module, weights.dtype, device) for module in packed_modules(skeleton, modules, of_experts=True)
    )
    if device.type == "cpu":  # converted as they come
        unpacked_bytes += sum(record.copied.flat_bytes for record in having)
    dense = [dense_part(record, modules) for record in skeleton.records]
    experts = ExpertLoad(
        num_layers=len(having),
        num_experts=num_experts,
        chosen=round(share * num_experts),
        expert_bytes=sum(_moved_bytes(record, device) for record in having) / count,
        unpacked_bytes=unpacked_bytes / count,
        between_bytes=between / count,
        row_flops=2.0 * (packed + plain) / count,
        device_kept=num_experts,
        ram_kept=num_experts,
        multiplied=_multiplied(skeleton.expert_groups, weights.dtype, device),
        host_multiplies=_multiplied(skeleton.expert_groups, weights.dtype, torch.device("cpu")) is not None,
    )
    return MixtureSizes(experts=experts, dense_bytes=tuple(_moved_bytes(record, device) for record in dense))


def kept_experts(experts: ExpertLoad, placement: ExpertPlacement) -> ExpertLoad:
    """Return a mixture's experts with as many of each layer kept as a placement has memory for."""
    kept = min(experts.num_experts, placement.num_kept / experts.num_layers)
    return replace(
        experts,
        device_kept=0.0 if placement.is_on_host else kept,
        ram_kept=max(kept, placement.num_pinned / experts.num_layers),
        is_on_host=placement.is_on_host,
    )


def _multiplied(groups: Sequence[ExpertGroup], dtype: torch.dtype, device: torch.device) -> PackedLoad | None:
    """Return an expert that is multiplied as it is packed; None where there is no kernel for all of its weights."""
    matrices = groups[0].matrices if groups else ()
    packings = [(matrix.packing, matrix.shape) for matrix in matrices if matrix.packing and matrix.in_blocks]
    kernels = [
        kernel for packing, shape in packings if (kernel := kernel_of(packing, shape, dtype, device)) is not None
    ]
    if not kernels or len(kernels) < len(matrices):
        return None
    parts = [part for packing, shape in packings for part in packing.part_shapes(shape).values()]
    num_weights = sum(matrix.num_weights for matrix in matrices)
    return PackedLoad(
        packed_format=packings[0][0].name,
        num_weights=num_weights,
        num_bytes=sum(math.prod(shape) * part_dtype.itemsize for shape, part_dtype in parts),
        unpacked_bytes=num_weights * dtype.itemsize,
        max_rows=min(kernel.max_rows for kernel in kernels),
    )


def packed_modules(skeleton: Skeleton, modules: tuple[str, ...], *, of_experts: bool) -> list[PackedModule]:
    """Return the modules with packed weights that are in the `modules` of experts, or those outside of them."""
    names = {module: f"{name}." for name, module in skeleton.model.named_modules()}
    return [packed for packed in skeleton.packed if names[packed.module].startswith(modules) == of_experts]


def dense_part(record: LayerRecord, modules: tuple[str, ...]) -> LayerRecord:
    """Return a layer without its experts."""
    return record.without(_expert_names(record, modules))


def _expert_names(record: LayerRecord, modules: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in record.tensors if name.startswith(modules))


def _moved_bytes(record: LayerRecord, device: torch.device) -> int:
    return record.flat_bytes if device.type != "cpu" else record.stored_bytes
