"""The experts of a mixture that move on demand: their sizes, and where they wait, from headers and memory alone.

The dense parts of all layers come first: they stay on the device where they fit. What is left of the device's memory,
and of RAM, holds the experts that were asked for last; those in RAM include those on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from edgespec.placement.memory import host_uses
from edgespec.placement.weights import Weights, chosen_experts
from offload.layer_store import LayerRecord, StoredTensor
from offload.placement import NUM_SLOTS_CONVERTED, Placement
from profiles.roofline import ExpertLoad

LAYERS_USES = (" resident layers", "stream buffers")  # what `place_layers` adds to the uses of a device
UNPACK_USE = "weights while unpacked"


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

    def load(self, *, device_kept: float, ram_kept: float) -> ExpertLoad:
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

    def load(self) -> ExpertLoad:
        """Return what passes move and compute of the experts."""
        return self.sizes.load(device_kept=self.device_kept, ram_kept=self.ram_kept)


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
    on_demand = [_part(record, modules, are_experts=True) for record in skeleton.records]
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
    dense = [_part(record, modules, are_experts=False) for record in skeleton.records]
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
    """Return where a mixture's weights wait within the memory of a placement; None for a model without experts."""
    sizes = expert_sizes(weights, device)
    if sizes is None:
        return None
    free_bytes = placement.device_budget_bytes - _fixed_bytes(placement, sizes.num_experts)
    least_bytes = NUM_SLOTS_CONVERTED * max(sizes.dense_bytes)
    dense_bytes = sum(sizes.dense_bytes)
    resident_bytes = dense_bytes
    if dense_bytes > free_bytes:
        resident_bytes = _that_fit(sizes.dense_bytes, free_bytes - least_bytes)
        free_bytes -= least_bytes
    device_kept = _kept(sizes, free_bytes - resident_bytes)
    waiting_bytes, ram_bytes, ram_kept = dense_bytes - resident_bytes, 0, device_kept
    if device.type != "cpu":
        free_host_bytes = placement.host_budget_bytes - sum(host_uses(weights.skeleton).values())
        ram_bytes = max(0, min(waiting_bytes, free_host_bytes))
        ram_kept = max(device_kept, _kept(sizes, free_host_bytes - ram_bytes))
    return ExpertPlaces(
        sizes=sizes,
        dense_resident_bytes=resident_bytes,
        dense_ram_bytes=ram_bytes,
        dense_disk_bytes=waiting_bytes - ram_bytes,
        device_kept=device_kept,
        ram_kept=ram_kept,
    )


def dense_part(record: LayerRecord, modules: tuple[str, ...]) -> LayerRecord:
    """Return a layer without its experts."""
    return _part(record, modules, are_experts=False)


def _part(record: LayerRecord, modules: tuple[str, ...], *, are_experts: bool) -> LayerRecord:
    tensors: dict[str, StoredTensor] = {
        name: tensor for name, tensor in record.tensors.items() if name.startswith(modules) == are_experts
    }
    return LayerRecord(index=record.index, tensors=tensors)


def _moved_bytes(record: LayerRecord, device: torch.device) -> int:
    return record.flat_bytes if device.type != "cpu" else record.stored_bytes


def _fixed_bytes(placement: Placement, num_experts: int) -> int:
    """Return the bytes of the device that neither layers nor experts have; of experts one is unpacked at a time."""
    uses = {use: num_bytes for use, num_bytes in placement.device_bytes.items() if not use.endswith(LAYERS_USES)}
    if UNPACK_USE in uses:
        uses[UNPACK_USE] //= num_experts
    return sum(uses.values())


def _that_fit(layer_bytes: tuple[int, ...], free_bytes: int) -> int:
    """Return the bytes of as many layers, from the first on, as fit."""
    total = 0
    for num_bytes in layer_bytes:
        if total + num_bytes > free_bytes:
            break
        total += num_bytes
    return total


def _kept(sizes: ExpertSizes, free_bytes: float) -> float:
    """Return how many of each layer's experts fit."""
    return min(float(sizes.num_experts), max(0.0, free_bytes) / (sizes.num_layers * sizes.expert_bytes))
