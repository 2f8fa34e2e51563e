"""Placement says which decoder layer lives where. It is arithmetic over byte counts, nothing else.

Layers that are resident on the compute device are spread evenly over the depth, so that others load
while these compute. On an accelerator some of the others wait in pinned memory, spread evenly too, and
the rest is on disk, which reads while those are copied. On a CPU, whose device memory is main
memory, all that is not resident is on disk.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NotRequired, TypedDict, Unpack

from offload.allocated import allocated_bytes
from offload.errors import PlacementError
from offload.experts.expert_use import ExpertUse
from offload.layer_store import LayerRecord

GIB = 1 << 30
NUM_SLOTS_CONVERTED = 2  # one in use, one being filled
NUM_STAGING_BUFFERS = 4  # of pinned memory, between disk and device
STAGING_BYTES = 64 << 20  # of each at most: all of them fit the least that systems lock
NUM_SLOTS_MAPPED = 3  # mapped pages need no copy: read two layers ahead where memory allows
MIN_SLOTS = 2
OUTSIDE_INDEX = -1  # of the record of everything outside the layers
STAGING = "staging buffers"
PINNED = "layers, copied in each pass"
COPIES = "draft: weights"  # those of a draft that is a copy of the layers that do not stay
KEYS = "target: keys and values"
KEYS_ON_THE_WAY = "keys and values on their way"
WAITING_KEYS = "layers: keys and values"  # of layers that stream, in RAM


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """The places of experts that come on demand."""

    num_experts: int  # of all layers
    num_kept: int  # that stay at a time, on the device or the host: those that are requested most
    num_pinned: int  # that wait in pinned host memory
    expert_bytes: int  # of one where it stays, the largest
    is_on_host: bool = False  # experts stay beside an accelerator, and the processor computes them where they lie
    use: ExpertUse | None = None  # measured on earlier texts: the most used are pinned first

    @property
    def num_left(self) -> int:
        """The number of experts that have no place to stay."""
        return self.num_experts - self.num_kept

    @property
    def kept_bytes(self) -> int:
        """The bytes that experts may take where they stay."""
        return self.num_kept * self.expert_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKeys:
    """The bytes of each layer's keys and values: they stay on the device where the layer does, and else wait in RAM."""

    device_bytes: Sequence[int]
    host_bytes: Sequence[int]
    row_bytes: Sequence[int]
    rows: int  # of all texts, that a pass copies to the device at most
    window_rows: Sequence[int]  # of these, as many as each layer's windows have
    new_rows: int  # that it copies back
    buffer_bytes: int  # on the device, where those that wait come to


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of each layer, and the uses of memory.

    Where experts come on demand, the layers counted here are the layers' dense parts.
    """

    num_layers: int
    resident_layers: frozenset[int]  # indices of those that stay on the device
    pinned_layers: frozenset[int] = frozenset()  # that wait in pinned host memory; the rest is read from disk
    num_slots: int = 1
    streamed_bytes: int = 0  # bytes a pass reads or copies; of experts, at most
    disk_bytes: int = 0  # of these, from disk
    is_cacheable: bool = True  # the system's cache of pages can hold them from one pass to the next
    device_bytes: dict[str, int] = field(default_factory=dict)  # use -> bytes, on the compute device
    device_budget_bytes: int = 0
    host_bytes: dict[str, int] = field(default_factory=dict)  # use -> bytes in RAM, where RAM is not the device's
    host_budget_bytes: int = 0
    has_table_on_host: bool = False  # whether input embeddings wait in RAM, and send rows to the device
    unpacked: frozenset[int] = (
        frozenset()
    )  # records, the outside's too, whose weights are unpacked when they are loaded
    slow: frozenset[int] = frozenset()  # of these, records whose weights are put in slow layouts, too
    has_unpacked_draft: bool = False  # whether all of the draft's are
    experts: ExpertPlacement | None = None  # None: they are parts of their layers, which live and stream whole
    waiting_keys: frozenset[int] = frozenset()  # layers whose keys and values wait in RAM
    keys_row_bytes: int = 0  # of a row's, in all of these layers
    window_keys_bytes: Mapping[int, int] = field(default_factory=dict)  # of these, by the rows that windows have
    keys_rows: int = 0  # of all full texts, that a pass copies to the device
    new_rows: int = 0  # of all texts, that go back

    def moved_keys_bytes(self, rows: int) -> int:
        """Return the bytes of keys and values that a pass copies to the device and back, where texts have such rows."""
        beyond = sum(max(0, rows - most) * row_bytes for most, row_bytes in self.window_keys_bytes.items())
        return (rows + self.new_rows) * self.keys_row_bytes - beyond

    @property
    def keys_bytes(self) -> int:
        """The bytes of keys and values that a pass of full texts copies to the device and back."""
        return self.moved_keys_bytes(self.keys_rows)

    @property
    def pass_bytes(self) -> int:
        """The bytes that a pass of full texts moves: weights, and keys and values."""
        return self.streamed_bytes + self.keys_bytes

    @property
    def num_resident(self) -> int:
        """The number of layers that stay on the device."""
        return len(self.resident_layers)

    @property
    def num_pinned(self) -> int:
        """The number of layers that wait in pinned host memory."""
        return len(self.pinned_layers)

    @property
    def is_resident(self) -> bool:
        """Return whether all weights stay on the device."""
        return self.num_resident == self.num_layers and self.experts is None

    @property
    def resident_share(self) -> float:
        """The share of the weights that stays on the device."""
        share = self.num_resident / self.num_layers
        return share if self.experts is None else min(share, self.experts.num_kept / self.experts.num_experts)

    @property
    def every_pass_bytes(self) -> int:
        """The bytes that every pass reads or copies: all but those of experts."""
        experts = self.experts
        return self.streamed_bytes - (experts.num_left * experts.expert_bytes if experts is not None else 0)

    @property
    def in_words(self) -> str:
        """The layers and experts that stay on the device, for a sentence."""
        if self.experts is None:
            return f"{self.num_resident} of {self.num_layers} layers"
        kept = f"{self.experts.num_kept} of {self.experts.num_experts} experts"
        return f"{kept} and the rest of {self.num_resident} of {self.num_layers} layers"

    @property
    def num_on_disk(self) -> int:
        """The number of layers that are read from disk in each pass."""
        return self.num_layers - self.num_resident - self.num_pinned

    @property
    def planned_bytes(self) -> int:
        """All device memory that the plan accounts for."""
        return sum(self.device_bytes.values())

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the plan for people, one line a use."""
        device = "GPU" if self.host_bytes else "RAM"
        lines = [_column(device, self.device_bytes, self.device_budget_bytes)]
        if self.host_bytes:
            lines.append(_column("RAM", self.host_bytes, self.host_budget_bytes))
        if self.disk_bytes:
            on_disk = f"{self.num_on_disk} layers, read in each pass"
            if self.experts is not None:
                on_disk = "what is read in a pass, at most"
            lines.append(f"  disk  {on_disk:<34}{self.disk_bytes / GIB:9.3f} GiB")
        return "\n".join(lines)


def _column(title: str, uses: dict[str, int], budget_bytes: int) -> str:
    """Return the uses of one memory in GiB, one a line, then their sum beside the limit."""
    lines = [f"  {title:<6}{what:<34}{num_bytes / GIB:9.3f} GiB" for what, num_bytes in uses.items()]
    total = f"{sum(uses.values()) / GIB:9.3f} GiB of {budget_bytes / GIB:.3f} GiB"
    return "\n".join([*lines, f"  {title:<6}{'together':<34}{total}"])


class PlaceBytes(TypedDict):
    """The memory that layers are placed in."""

    device_memory: dict[str, int]  # of the device, by others
    device_budget_bytes: int
    host_memory: NotRequired[dict[str, int] | None]  # of RAM; None where the device's memory is RAM itself
    host_budget_bytes: NotRequired[int]
    host_room_bytes: NotRequired[int]  # of the host's budget, left for the system where memory is locked
    max_resident: NotRequired[int | None]  # layers; None: as many as fit
    copy_bytes: NotRequired[Sequence[int]]  # that each layer takes on the device where it does not stay there itself
    keys: NotRequired[LayerKeys]  # that go with their layers, beside those that the device has in any case


def place_layers(records: Sequence[LayerRecord], **memory: Unpack[PlaceBytes]) -> Placement:
    """Keep as many layers on the device as fit beside its other uses.

    Raises PlacementError, with the whole table, when not even a stream of all layers fits.
    """
    device_memory, device_budget_bytes = memory["device_memory"], memory["device_budget_bytes"]
    host_memory, host_budget_bytes = memory.get("host_memory"), memory.get("host_budget_bytes", 0)
    max_resident = memory.get("max_resident")
    on_accelerator = host_memory is not None
    layer_bytes, num_slots, read_bytes = _stream_shape(records, on_accelerator=on_accelerator)
    flat_bytes = [record.flat_bytes for record in records]
    none = [0] * len(records)
    copy_bytes = memory.get("copy_bytes", none)
    keys = memory.get("keys") or LayerKeys(
        device_bytes=none, host_bytes=none, row_bytes=none, rows=0, window_rows=none, new_rows=0, buffer_bytes=0
    )
    # Where a layer stays
    added_bytes = [
        sum(of) for of in zip(layer_bytes, keys.device_bytes, (-copied for copied in copy_bytes), strict=True)
    ]
    free_bytes = device_budget_bytes - sum(device_memory.values()) - sum(copy_bytes) - keys.buffer_bytes
    if num_slots * max(layer_bytes) > free_bytes:
        num_slots = MIN_SLOTS
    slots_bytes = allocated_bytes(num_slots * max(flat_bytes)) if on_accelerator else num_slots * max(layer_bytes)
    stream_bytes = slots_bytes + read_bytes
    most = len(records) if max_resident is None else min(max_resident, len(records))
    if most == len(records) and sum(added_bytes) <= free_bytes:
        resident, stream_bytes = frozenset(range(len(records))), 0
    else:
        free_bytes -= stream_bytes
        resident = _spread_that_fit(range(len(records)), added_bytes, free_bytes, most=min(most, len(records) - 1))
    host_bytes = dict(host_memory or {})
    pinned: frozenset[int] = frozenset()
    waiting = [layer for layer in range(len(records)) if layer not in resident]
    with_keys = [layer for layer in waiting if keys.device_bytes[layer]]
    host_bytes = counted(host_bytes, len(with_keys), WAITING_KEYS, _sum_of(with_keys, keys.host_bytes))
    if on_accelerator and waiting:
        free_host_bytes = host_budget_bytes - sum(host_bytes.values()) - memory.get("host_room_bytes", 0)
        staging_bytes = NUM_STAGING_BUFFERS * staging_part_bytes(max(flat_bytes))  # for layers that stay on disk
        if _sum_of(waiting, flat_bytes) > free_host_bytes:
            host_bytes[STAGING] = staging_bytes
            free_host_bytes -= staging_bytes
        pinned = _spread_that_fit(waiting, flat_bytes, free_host_bytes, most=len(waiting))
        host_bytes = counted(host_bytes, len(pinned), PINNED, _sum_of(pinned, flat_bytes))
    disk_bytes = sum(records[layer].stored_bytes for layer in waiting if layer not in pinned)
    pinned_bytes = sum(records[layer].flat_bytes for layer in pinned)
    placement = Placement(
        num_layers=len(records),
        resident_layers=resident,
        pinned_layers=pinned,
        num_slots=max(1, min(num_slots, len(waiting))),
        streamed_bytes=disk_bytes + pinned_bytes,
        disk_bytes=disk_bytes,
        device_bytes={
            **device_memory,
            **({COPIES: _sum_of(waiting, copy_bytes)} if "copy_bytes" in memory else {}),
            **(_keys_memory(device_memory, keys, resident) if "keys" in memory else {}),
            f"{len(resident)} resident layers": _sum_of(resident, layer_bytes),
            "stream buffers": stream_bytes,
        },
        device_budget_bytes=device_budget_bytes,
        host_bytes=host_bytes,
        host_budget_bytes=host_budget_bytes,
        waiting_keys=frozenset(with_keys),
        keys_row_bytes=_sum_of(with_keys, keys.row_bytes),
        window_keys_bytes={
            rows: _sum_of([layer for layer in with_keys if keys.window_rows[layer] == rows], keys.row_bytes)
            for rows in {keys.window_rows[layer] for layer in with_keys}
        },
        keys_rows=keys.rows,
        new_rows=keys.new_rows,
    )
    _check_budgets(placement)
    return placement


def _keys_memory(device_memory: dict[str, int], keys: LayerKeys, resident: Iterable[int]) -> dict[str, int]:
    """Return what the device keeps of texts, and what the rest comes in."""
    stay_bytes = _sum_of(resident, keys.device_bytes)
    return {KEYS: device_memory.get(KEYS, 0) + stay_bytes, KEYS_ON_THE_WAY: keys.buffer_bytes}


def with_pinned_layers(placement: Placement, records: Sequence[LayerRecord], pinned: frozenset[int]) -> Placement:
    """Return the placement as it is where the system locked memory for these layers alone: others come from disk."""
    read = [records[layer] for layer in placement.pinned_layers - pinned]
    if not read:
        return placement
    read_bytes, flat_bytes = sum(record.stored_bytes for record in read), sum(record.flat_bytes for record in read)
    staging_bytes = NUM_STAGING_BUFFERS * staging_part_bytes(max(record.flat_bytes for record in records))
    host_bytes = {STAGING: staging_bytes, **placement.host_bytes}
    pinned_bytes = sum(records[layer].flat_bytes for layer in pinned)
    return replace(
        placement,
        pinned_layers=pinned,
        streamed_bytes=placement.streamed_bytes + read_bytes - flat_bytes,
        disk_bytes=placement.disk_bytes + read_bytes,
        host_bytes=counted(host_bytes, len(pinned), PINNED, pinned_bytes),
    )


def staging_part_bytes(largest_bytes: int) -> int:
    """Return the bytes of a staging buffer, where the largest layer has so many."""
    return min(STAGING_BYTES, largest_bytes)


def counted(uses: dict[str, int], number: int, what: str, used_bytes: int) -> dict[str, int]:
    """Return uses of a memory with the bytes of `number` of `what`, if any, in place of those counted before."""
    others = {label: used for label, used in uses.items() if not label.endswith(f" {what}")}
    return {**others, f"{number} {what}": used_bytes} if number else others


def all_resident(num_layers: int, *, is_unpacked: bool = False) -> Placement:
    """Return the placement of a model whose bytes are part of another's plan, as a draft's are of its target's."""
    layers = frozenset(range(num_layers))
    return Placement(
        num_layers=num_layers, resident_layers=layers, unpacked=layers | {OUTSIDE_INDEX} if is_unpacked else frozenset()
    )


def _stream_shape(records: Sequence[LayerRecord], *, on_accelerator: bool) -> tuple[list[int], int, int]:
    """Return each layer's bytes where it computes, the ring's slots, and the ring's bytes beside its slots."""
    if on_accelerator:
        return [allocated_bytes(record.flat_bytes) for record in records], NUM_SLOTS_CONVERTED, 0
    layer_bytes = [record.cpu_bytes for record in records]
    converted_bytes = max(record.copied.stored_bytes for record in records)  # pages that are read to be converted
    is_converted = 2 * converted_bytes > max(record.stored_bytes for record in records)
    return layer_bytes, NUM_SLOTS_CONVERTED if is_converted else NUM_SLOTS_MAPPED, converted_bytes


def _spread_that_fit(
    layers: Sequence[int], layer_bytes: Sequence[int], free_bytes: int, *, most: int
) -> frozenset[int]:
    """Return as many of the layers as fit together, evenly spread."""
    for count in range(most, 0, -1):
        chosen = frozenset(layers[(2 * place + 1) * len(layers) // (2 * count)] for place in range(count))
        if _sum_of(chosen, layer_bytes) <= free_bytes:
            return chosen
    return frozenset()


def _sum_of(layers: Iterable[int], layer_bytes: Sequence[int]) -> int:
    return sum(layer_bytes[layer] for layer in layers)


def _check_budgets(placement: Placement) -> None:
    """Raise PlacementError when a memory is planned beyond its limit."""
    memories = [
        ("GPU memory" if placement.host_bytes else "RAM", placement.device_bytes, placement.device_budget_bytes)
    ]
    if placement.host_bytes:
        memories.append(("RAM", placement.host_bytes, placement.host_budget_bytes))
    for memory, uses, budget_bytes in memories:
        needed_bytes = sum(uses.values())
        if needed_bytes > budget_bytes:
            raise PlacementError(
                "E_MEMORY",
                f"{needed_bytes / GIB:.3f} GiB of {memory} are needed with every layer streamed, "
                f"{(needed_bytes - budget_bytes) / GIB:.3f} GiB more than the limit:\n{placement.table()}\n",
                "Raise the memory limit, lower `size` or `max_new_tokens`, or use a smaller draft.",
                needed_bytes=needed_bytes,
            )
