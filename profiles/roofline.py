"""From bytes and rates to seconds: a pass is as slow as the slowest of what it must do. This is pure arithmetic.

    stream   ram / link + disk / min(disk rate, link)        layers come in order, one after the other
    compute  unpacked / memory + max(read / memory, rows * FLOP / rate)
    pass     max(stream, compute, layers * layer call) + heads

`read` is every byte that kernels read: layers, resident or just arrived, keys and values, unpacked weights.
It leaves out the host's work around a pass, and the two layers that load while a draft grows the tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from profiles.hardware import Achieved, Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The bytes and operations that a machine achieves in a second."""

    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float  # infinite where RAM is the device's memory
    disk_bytes_per_s: float
    layer_call_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """The bytes that one pass of a model moves, and what it computes."""

    num_layers: int
    resident_bytes: int  # decoder layers that stay on the device
    ram_bytes: int  # decoder layers that are copied over the link
    disk_bytes: int  # decoder layers that are read from disk
    unpacked_bytes: int  # written and read again, where weights are packed or converted
    cache_bytes: int  # keys and values
    row_flops: float  # of all decoder layers, for one row
    head_bytes: int
    head_row_flops: float
    head_rows: int  # that the head takes at once

    @property
    def layer_bytes(self) -> int:
        """The bytes of all decoder layers as they are stored."""
        return self.resident_bytes + self.ram_bytes + self.disk_bytes


def achieved_rates(hardware: Hardware, achieved: Achieved, *, half: bool, disk_bytes_per_s: float) -> Rates:
    """Return the data sheet's rates times the shares of them that are reached; `half` is for bf16 and fp16."""
    flops_per_s = hardware.half_flops_per_s if half else hardware.float32_flops_per_s
    return Rates(
        memory_bytes_per_s=achieved.memory * hardware.memory_bytes_per_s,
        flops_per_s=achieved.compute * flops_per_s,
        link_bytes_per_s=achieved.link * hardware.link_bytes_per_s,
        disk_bytes_per_s=achieved.disk * disk_bytes_per_s,
        layer_call_s=achieved.layer_call_s,
    )


def stream_s(load: ModelLoad, rates: Rates) -> float:
    """Return the seconds until the last streamed layer is there: ram / link + disk / min(disk rate, link)."""
    from_disk_per_s = min(rates.disk_bytes_per_s, rates.link_bytes_per_s)
    return load.ram_bytes / rates.link_bytes_per_s + load.disk_bytes / from_disk_per_s


def compute_s(load: ModelLoad, rates: Rates, *, rows: int) -> float:
    """Return the seconds of the layers' kernels for so many rows; the host may need longer to issue them."""
    read_bytes = load.layer_bytes + load.unpacked_bytes + load.cache_bytes
    products_s = max(read_bytes / rates.memory_bytes_per_s, rows * load.row_flops / rates.flops_per_s)
    unpack_s = load.unpacked_bytes / rates.memory_bytes_per_s
    return max(unpack_s + products_s, load.num_layers * rates.layer_call_s)


def head_s(load: ModelLoad, rates: Rates, *, rows: int) -> float:
    """Return the seconds of logits of so many rows at once: the head's matrix is read once for every `head_rows`."""
    read_bytes = math.ceil(rows / load.head_rows) * load.head_bytes
    return max(read_bytes / rates.memory_bytes_per_s, rows * load.head_row_flops / rates.flops_per_s)


def verify_s(load: ModelLoad, rates: Rates, *, rows: int, head_calls: float = 1.0) -> float:
    """Return the seconds of a target's pass over a tree: max(stream, compute), then the head.

    The head computes row by row along the accepted path.
    """
    return max(stream_s(load, rates), compute_s(load, rates, rows=rows)) + head_calls * head_s(load, rates, rows=1)


def draft_call_s(load: ModelLoad, rates: Rates, *, width: int) -> float:
    """Return the seconds of one call of a resident draft on a layer of `width` nodes.

    The logits of all nodes are needed.
    """
    return compute_s(load, rates, rows=width) + head_s(load, rates, rows=width)
