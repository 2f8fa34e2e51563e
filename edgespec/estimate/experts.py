"""The experts of a mixture that move on demand: their sizes from headers alone, and where a placement lets them wait.

Those that wait in RAM include those on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from edgespec.model.layer_kinds import chosen_experts
from edgespec.placement.weights import Weights
from offload.layer_store import LayerRecord
from offload.placement import Placement
from profiles.roofline import ExpertLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """The experts of one model, and what is left of its layers without them."""

    num_layers: int  # that have experts
    num_experts: int  # of a layer
    chosen: int  # by a row
    expert_bytes: float  # as they move
    unpacked_bytes: float  # of an expert, where it is packed or converted
    num_weights: float  # of an expert
    dense_bytes: tuple[int, ...]  # of each layer, experts left out

    @property
    def all_bytes(self) -> float:
        """The bytes of all experts of all layers."""
        return self.num_layers * self.num_experts * self.expert_bytes

    def load(self, *, device_kept: float, ram_kept: float, is_on_host: bool = False) -> ExpertLoad:
        """Return what passes move and compute, with so many of a layer's experts kept."""
        return ExpertLoad(
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            chosen=self.chosen,
            expert_bytes=self.expert_bytes,
            unpacked_bytes=self.unpacked_bytes,
            row_flops=2.0 * self.num_weights,
            device_kept=device_kept,
            ram_kept=ram_kept,
            is_on_host=is_on_host,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlaces:
    """Where a mixture's weights wait: bytes of dense parts, and experts of each layer."""

    sizes: ExpertSizes
    dense_resident_bytes: int
    dense_ram_bytes: int
    dense_disk_bytes: int
    device_kept: float
    ram_kept: float
    is_on_host: bool = False  # the CPU computes all of them

    def load(self) -> ExpertLoad:
        """Return what passes move and compute of the experts."""
        return self.sizes.load(device_kept=self.device_kept, ram_kept=self.ram_kept, is_on_host=self.is_on_host)


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


def expert_sizes(weights: Weights, device: torch.device) -> ExpertSizes | None:
    """Return the experts of a model's decoder layers; None where there are none that a row could leave out."""
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
    packed = sum(
        math.prod(weight.shape)
        for name, module in skeleton.model.named_modules()
        for one in skeleton.packed
        if one.module is module and f"{name}.".startswith(modules)
        for _, weight in one.weights
    )
    plain = sum(math.prod(tensor.shape) for record in having for name, tensor in record.tensors.items()
                if "_packed." not in name and len(tensor.shape) > 2)  # fmt: skip
    unpacked_bytes = packed * weights.dtype.itemsize
    if device.type == "cpu":  # converted as they come
        unpacked_bytes += sum(record.copied.flat_bytes for record in having)
    dense = [dense_part(record, modules) for record in skeleton.records]
    return ExpertSizes(
        num_layers=len(having),
        num_experts=num_experts,
        chosen=round(share * num_experts),
        expert_bytes=sum(_moved_bytes(record, device) for record in having) / count,
        unpacked_bytes=unpacked_bytes / count,
        num_weights=(packed + plain) / count,
        dense_bytes=tuple(_moved_bytes(record, device) for record in dense),
    )


def place_experts(weights: Weights, placement: Placement, device: torch.device) -> ExpertPlaces | None:
    """Return where a mixture's weights wait; None for a model without experts, and where whole layers stream."""
    sizes = expert_sizes(weights, device)
    if sizes is None or not (placement.is_resident or placement.experts is not None):
        return None
    kept = pinned = float(sizes.num_experts)
    if placement.experts is not None:
        kept = min(kept, placement.experts.num_kept / sizes.num_layers)
        pinned = max(kept, placement.experts.num_pinned / sizes.num_layers)
    dense_resident_bytes = sum(sizes.dense_bytes[layer] for layer in placement.resident_layers)
    dense_ram_bytes = sum(sizes.dense_bytes[layer] for layer in placement.pinned_layers)
    is_on_host = placement.experts is not None and placement.experts.is_on_host
    if is_on_host:
        kept = 0.0
    return ExpertPlaces(
        sizes=sizes,
        dense_resident_bytes=dense_resident_bytes,
        dense_ram_bytes=dense_ram_bytes,
        dense_disk_bytes=sum(sizes.dense_bytes) - dense_resident_bytes - dense_ram_bytes,
        device_kept=kept,
        ram_kept=pinned,
        is_on_host=is_on_host,
    )


def dense_part(record: LayerRecord, modules: tuple[str, ...]) -> LayerRecord:
    """Return a layer without its experts."""
    return record.without(_expert_names(record, modules))


def _expert_names(record: LayerRecord, modules: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in record.tensors if name.startswith(modules))


def _moved_bytes(record: LayerRecord, device: torch.device) -> int:
    return record.flat_bytes if device.type != "cpu" else record.stored_bytes
