"""Experts stay in the memory that the dense parts of all layers leave. It is arithmetic over bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from offload.allocated import allocated_bytes
from offload.errors import PlacementError
from offload.experts.cpu_experts import NUM_READERS
from offload.experts.expert_group import ExpertGroup
from offload.experts.expert_source import MAX_UNDER_WAY
from offload.layer_store import LayerRecord
from offload.placement import ExpertPlacement, PlaceBytes, Placement, counted, place_layers

EXPERTS = "experts"
PINNED = "experts, copied when asked for"
READ = "experts while they are read"
MOST_READ_SHARE = 4  # of the experts that could stay, one in so many may be on its way instead


def place_on_host(
    dense: Sequence[LayerRecord], groups: Sequence[ExpertGroup], **memory: Unpack[PlaceBytes]
) -> Placement:
    """Place the layers' dense parts as whole layers are placed, and let the experts stay in the rest of RAM.

    Raises PlacementError where not even a stream of dense parts fits the device, and one expert RAM.
    """
    expert_bytes = max(group.expert_stored_bytes for group in groups)
    num_experts = sum(group.num_experts for group in groups)
    reserved: PlaceBytes = {**memory, "host_memory": {**(memory.get("host_memory") or {}), EXPERTS: expert_bytes}}
    placed = place_layers(dense, **reserved)
    left_bytes = placed.host_budget_bytes - sum(placed.host_bytes.values()) + expert_bytes
    num_kept, being_read = _kept_in_pages(num_experts, left_bytes, expert_bytes)
    placed = replace(placed, host_bytes=placed.host_bytes | being_read)
    experts = ExpertPlacement(
        num_experts=num_experts, num_kept=num_kept, num_pinned=0, expert_bytes=expert_bytes, is_on_host=True
    )
    return _with_experts(placed, experts)


def _kept_in_pages(num_experts: int, left_bytes: int, expert_bytes: int) -> tuple[int, dict[str, int]]:
    """Return how many experts stay in mapped pages, and the bytes of those that are being read, if any are.

    Pages that are on their way take the place of others, which the system would choose: those of kept experts.
    """
    num_fitting = left_bytes // expert_bytes
    if num_fitting >= num_experts:
        return num_experts, {}
    num_read = min(MAX_UNDER_WAY, num_fitting // MOST_READ_SHARE)
    return num_fitting - num_read, {READ: num_read * expert_bytes}


def place_on_demand(
    dense: Sequence[LayerRecord], groups: Sequence[ExpertGroup], **memory: Unpack[PlaceBytes]
) -> Placement:
    """Place the layers' dense parts as whole layers are placed, and give the experts the rest.

    A pass reads every dense part, and few experts: so dense parts come first. But as many experts as a layer has can
    stay, where half of the free memory suffices for them: a prompt's rows pass a layer in chunks, which need the
    same experts. Raises PlacementError where not even a stream of dense parts and one expert fit.
    """
    device_memory, host_memory = memory["device_memory"], memory.get("host_memory")
    on_accelerator = host_memory is not None
    expert_bytes = max(group.expert_flat_bytes if on_accelerator else group.expert_stored_bytes for group in groups)
    num_experts = sum(group.num_experts for group in groups)
    free_bytes = memory["device_budget_bytes"] - sum(device_memory.values())
    layer_bytes = max(group.num_experts for group in groups) * expert_bytes
    reserved_bytes = max(expert_bytes, min(layer_bytes, free_bytes // 2))
    if host_memory is not None:
        host_memory = {**host_memory, READ: NUM_READERS * expert_bytes}

    def place_dense(reserved_bytes: int) -> Placement:
        others: PlaceBytes = {
            **memory, "device_memory": {**device_memory, EXPERTS: reserved_bytes}, "host_memory": host_memory,
        }  # fmt: skip
        return place_layers(dense, **others)

    try:
        placed = place_dense(reserved_bytes)
    except PlacementError:
        placed = place_dense(expert_bytes)
    left_bytes = memory["device_budget_bytes"] - placed.planned_bytes + placed.device_bytes[EXPERTS]
    num_pinned = 0
    if not on_accelerator:
        num_kept, being_read = _kept_in_pages(num_experts, left_bytes, expert_bytes)
        placed = replace(placed, device_bytes=placed.device_bytes | being_read)
    else:
        num_kept = min(num_experts, left_bytes // expert_bytes)
        while allocated_bytes(num_kept * expert_bytes) > left_bytes:  # all slots are one allocation
            num_kept -= 1
    if on_accelerator and num_kept < num_experts:
        host_left_bytes = placed.host_budget_bytes - sum(placed.host_bytes.values()) - memory.get("host_room_bytes", 0)
        num_pinned = min(num_experts, max(0, host_left_bytes) // expert_bytes)
    experts = ExpertPlacement(num_experts=num_experts, num_kept=num_kept, num_pinned=0, expert_bytes=expert_bytes)
    return with_pinned_experts(_with_experts(placed, experts), num_pinned)


def _with_experts(placed: Placement, experts: ExpertPlacement) -> Placement:
    """Return a placement with these experts in place of the bytes reserved for some; the others are read from disk."""
    kept = {f"{experts.num_kept} of {experts.num_experts} experts": experts.kept_bytes}
    device_bytes, host_bytes = (
        {what: used for what, used in uses.items() if what != EXPERTS} | (kept if is_theirs else {})
        for uses, is_theirs in ((placed.device_bytes, not experts.is_on_host), (placed.host_bytes, experts.is_on_host))
    )
    read_bytes = experts.num_left * experts.expert_bytes
    return replace(
        placed,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        streamed_bytes=placed.streamed_bytes + read_bytes,
        disk_bytes=placed.disk_bytes + read_bytes,
        experts=experts,
    )


def with_pinned_experts(placement: Placement, num_pinned: int) -> Placement:
    """Return the placement where the system locks memory for this many experts: others come from disk."""
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
