"""How many experts stay in memory: what is left beside the dense parts of all layers. It is arithmetic over bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from offload.errors import PlacementError
from offload.experts.cpu_experts import NUM_READERS
from offload.experts.expert_group import ExpertGroup
from offload.layer_store import LayerRecord
from offload.placement import ExpertPlacement, PlaceBytes, Placement, counted, place_layers

EXPERTS = "experts"
PINNED = "experts, copied when asked for"


def place_on_host(
    dense: Sequence[LayerRecord], groups: Sequence[ExpertGroup], **memory: Unpack[PlaceBytes]
) -> Placement:
    """Place the layers' dense parts as whole layers are placed, and let the experts stay in what is left of RAM.

    Raises PlacementError where not even a stream of dense parts fits the device, and one expert RAM.
    """
    expert_bytes = max(group.expert_stored_bytes for group in groups)
    num_experts = sum(group.num_experts for group in groups)
    reserved: PlaceBytes = {**memory, "host_uses": {**(memory.get("host_uses") or {}), EXPERTS: expert_bytes}}
    placed = place_layers(dense, **reserved)
    left_bytes = placed.host_budget_bytes - sum(placed.host_bytes.values()) + expert_bytes
    num_kept = min(num_experts, left_bytes // expert_bytes)
    experts = ExpertPlacement(
        num_experts=num_experts, num_kept=num_kept, num_pinned=0, expert_bytes=expert_bytes, is_on_host=True
    )
    host_bytes = {what: used for what, used in placed.host_bytes.items() if what != EXPERTS}
    host_bytes[f"{num_kept} of {num_experts} experts"] = experts.kept_bytes
    disk_bytes = experts.num_left * expert_bytes
    return replace(
        placed,
        host_bytes=host_bytes,
        streamed_bytes=placed.streamed_bytes + disk_bytes,
        disk_bytes=placed.disk_bytes + disk_bytes,
        experts=experts,
    )


def place_on_demand(
    dense: Sequence[LayerRecord], groups: Sequence[ExpertGroup], **memory: Unpack[PlaceBytes]
) -> Placement:
    """Place the layers' dense parts as whole layers are placed, and give the experts what is left.

    A pass reads every dense part, and few experts: so dense parts come first. But as many experts as a layer has can
    stay, where half of the free memory suffices for them: a prompt's rows pass a layer in chunks, which ask for the
    same experts. Raises PlacementError where not even a stream of dense parts and one expert fit.
    """
    device_uses, host_uses = memory["device_uses"], memory.get("host_uses")
    on_accelerator = host_uses is not None
    expert_bytes = max(group.expert_flat_bytes if on_accelerator else group.expert_stored_bytes for group in groups)
    num_experts = sum(group.num_experts for group in groups)
    free_bytes = memory["device_budget_bytes"] - sum(device_uses.values())
    layer_bytes = max(group.num_experts for group in groups) * expert_bytes
    reserved_bytes = max(expert_bytes, min(layer_bytes, free_bytes // 2))
    if host_uses is not None:
        host_uses = {**host_uses, "experts while they are read": NUM_READERS * expert_bytes}

    def place_dense(reserved_bytes: int) -> Placement:
        others: PlaceBytes = {
            **memory, "device_uses": {**device_uses, EXPERTS: reserved_bytes}, "host_uses": host_uses,
        }  # fmt: skip
        return place_layers(dense, **others)

    try:
        placed = place_dense(reserved_bytes)
    except PlacementError:
        placed = place_dense(expert_bytes)
    left_bytes = memory["device_budget_bytes"] - placed.planned_bytes + placed.device_bytes[EXPERTS]
    num_kept = min(num_experts, left_bytes // expert_bytes)
    num_pinned = 0
    if on_accelerator and num_kept < num_experts:
        num_pinned = min(num_experts, (placed.host_budget_bytes - sum(placed.host_bytes.values())) // expert_bytes)
    experts = ExpertPlacement(
        num_experts=num_experts, num_kept=num_kept, num_pinned=num_pinned, expert_bytes=expert_bytes
    )
    device_bytes = {what: used for what, used in placed.device_bytes.items() if what != EXPERTS}
    device_bytes[f"{num_kept} of {num_experts} experts"] = experts.kept_bytes
    disk_bytes = max(0, experts.num_left - num_pinned) * expert_bytes
    return replace(
        placed,
        device_bytes=device_bytes,
        host_bytes=counted(placed.host_bytes, num_pinned, PINNED, num_pinned * expert_bytes),
        streamed_bytes=placed.streamed_bytes + experts.num_left * expert_bytes,
        disk_bytes=placed.disk_bytes + disk_bytes,
        experts=experts,
    )


def with_pinned_experts(placement: Placement, num_pinned: int) -> Placement:
    """Return the placement as it is where the system locked memory for so few experts: others come from disk."""
    experts = placement.experts
    if experts is None or num_pinned == experts.num_pinned:
        return placement
    before_bytes, now_bytes = (
        max(0, experts.num_left - pinned) * experts.expert_bytes for pinned in (experts.num_pinned, num_pinned)
    )
    return replace(
        placement,
        host_bytes=counted(placement.host_bytes, num_pinned, PINNED, num_pinned * experts.expert_bytes),
        disk_bytes=placement.disk_bytes - before_bytes + now_bytes,
        experts=replace(experts, num_pinned=num_pinned),
    )
