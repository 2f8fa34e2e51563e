"""Which decoder layer lives where: arithmetic over byte counts, nothing else.

The first layers are resident on the compute device, so that a pass starts on them while the first
streamed ones load. On an accelerator the next ones wait in pinned memory, the rest on disk; on a
CPU, whose device memory is main memory, all that is not resident is on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import MemoryPlanError
from offload.layer_store import LayerRecord

GIB = 1 << 30
NUM_SLOTS_CONVERTED = 2  # one in use, one being filled
NUM_STAGING_BUFFERS = 2  # of pinned memory, between disk and device
NUM_SLOTS_MAPPED = 3  # mapped pages are cheap: read two layers ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where each layer lives, and what the device memory is spent on."""

    num_layers: int
    num_resident: int  # layers [0, num_resident) stay on the device
    num_pinned: int  # the next ones are in pinned host memory; the rest is read from disk each pass
    num_slots: int
    streamed_bytes: int  # bytes a pass reads or copies
    device_bytes: dict[str, int]  # what -> bytes, on the compute device
    device_budget_bytes: int

    @property
    def pinned_layers(self) -> frozenset[int]:
        """Indices of the layers in pinned host memory."""
        return frozenset(range(self.num_resident, self.num_resident + self.num_pinned))

    @property
    def planned_bytes(self) -> int:
        """All device memory that the plan accounts for."""
        return sum(self.device_bytes.values())

    def table(self) -> str:
        """The plan for people, one line a use."""
        return format_table(self.device_bytes, self.device_budget_bytes)


def format_table(device_bytes: dict[str, int], budget_bytes: int) -> str:
    """Uses of memory in GiB, one a line, then their sum beside the limit."""
    lines = [f"  {what:<28}{num_bytes / GIB:9.3f} GiB" for what, num_bytes in device_bytes.items()]
    total = sum(device_bytes.values())
    return "\n".join([*lines, f"  {'together':<28}{total / GIB:9.3f} GiB of {budget_bytes / GIB:.3f} GiB"])


def place_layers(
    records: Sequence[LayerRecord],
    *,
    fixed_bytes: dict[str, int],
    device_budget_bytes: int,
    pinned_budget_bytes: int = 0,
    on_accelerator: bool,
    max_resident: int | None = None,
) -> Placement:
    """Keep as many layers on the device as fit beside `fixed_bytes`.

    Raises MemoryPlanError, with the whole table, when not even a stream of all layers fits.
    """
    if on_accelerator:
        layer_bytes = [record.flat_bytes for record in records]
        num_slots = NUM_SLOTS_CONVERTED
        stream_bytes = num_slots * max(layer_bytes)
    elif any(record.is_converted for record in records):
        layer_bytes = [record.flat_bytes if record.is_converted else record.stored_bytes for record in records]
        num_slots = NUM_SLOTS_CONVERTED
        stream_bytes = num_slots * max(layer_bytes) + max(record.stored_bytes for record in records)
    else:
        layer_bytes = [record.stored_bytes for record in records]
        num_slots = NUM_SLOTS_MAPPED
        stream_bytes = num_slots * max(layer_bytes)

    free_bytes = device_budget_bytes - sum(fixed_bytes.values())
    wanted = len(records) if max_resident is None else min(max_resident, len(records))
    num_resident = 0
    if wanted == len(records) and sum(layer_bytes) <= free_bytes:
        num_resident, stream_bytes = len(records), 0
    else:
        free_bytes -= stream_bytes
        for num_bytes in layer_bytes[: min(wanted, len(records) - 1)]:
            if num_bytes > free_bytes:
                break
            free_bytes -= num_bytes
            num_resident += 1
    device_bytes = dict(fixed_bytes)
    device_bytes[f"{num_resident} resident layers"] = sum(layer_bytes[:num_resident])
    device_bytes["stream buffers"] = stream_bytes
    if sum(device_bytes.values()) > device_budget_bytes:
        needed = sum(device_bytes.values())
        raise MemoryPlanError(
            "E_MEMORY",
            f"{needed / GIB:.3f} GiB are needed with every layer streamed, "
            f"{(needed - device_budget_bytes) / GIB:.3f} GiB more than the limit:\n"
            f"{format_table(device_bytes, device_budget_bytes)}\n",
            "Raise the memory limit, lower --tree-size or --max-new-tokens, or use a smaller draft.",
        )

    num_pinned = 0
    if on_accelerator:
        if sum(layer_bytes[num_resident:]) > pinned_budget_bytes:
            pinned_budget_bytes -= NUM_STAGING_BUFFERS * max(layer_bytes)  # for the layers that stay on disk
        for num_bytes in layer_bytes[num_resident:]:
            if num_bytes > pinned_budget_bytes:
                break
            pinned_budget_bytes -= num_bytes
            num_pinned += 1
    streamed = records[num_resident:]
    return Placement(
        num_layers=len(records),
        num_resident=num_resident,
        num_pinned=num_pinned,
        num_slots=max(1, min(num_slots, len(streamed))),
        streamed_bytes=sum(record.flat_bytes if on_accelerator else record.stored_bytes for record in streamed),
        device_bytes=device_bytes,
        device_budget_bytes=device_budget_bytes,
    )
