"""From bytes and rates to seconds: a pass is as slow as the slowest of what it must do. This is pure arithmetic.

    stream   max((ram - staged + disk + waiting) / link + staged / min(link, staging), disk / disk rate)
    compute  (unpacked + between) / memory + max(read / memory, rows * FLOP / rate) + kernels
    kernels  packed weights / max(weights of one row a second, weights of each row a second / rows)
    experts  max(elsewhere, compute of those asked for, asked * expert call)
    elsewhere  of those asked for and not kept: disk / min(disk rate, link) + in RAM * min(move, host) of `in_place.py`
    pass     max(stream, compute, layers * layer call) + experts + heads    tiers are spread over the depth

On a CPU the calls of kernels add to their arithmetic, because the same cores do both.

`read` is every byte that kernels read: layers, resident or just arrived, keys and values, unpacked weights. Packed
weights that a kernel multiplies as they are count in `kernels` instead; passes of more rows than it takes unpack them.
Experts of a mixture that move on demand are asked for once their router has spoken, so what they take comes on top
of the rest; which of them a pass asks for, and which are kept, `experts.py` expects. It leaves out the host's work
around a pass, and the two layers that load while a draft grows the tree.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from profiles.experts import Routing
from profiles.hardware import Achieved, Assumptions, Hardware, KernelRates
from profiles.in_place import HostRates

FEW = 4  # rows choose few experts where those are fewer than one in so many of a layer's
GROWN_LAYERS = 2  # decoder layers whose kernels a host issues in the time of a tree's layer: 137 launches, as counted
LOOP_SHARE = 10  # calls of an expert by itself for one call in torch's loop over all experts, of which it has two


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The bytes and operations that a machine achieves in a second."""

    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float  # infinite where RAM is the device's memory
    disk_bytes_per_s: float
    layer_call_s: float
    expert_call_s: float
    expert_spread: float  # of `experts.Routing`
    # Of the CPU beside a device, for experts that it computes
    host_bytes_per_s: float
    host_unpack_weights_per_s: float
    host_flops_per_s: float
    kernel_rows: float = 0.0  # that a card's kernel takes at least, by a rule that only the card itself can be asked
    noise_number_s: float = 0.0
    staging_bytes_per_s: float = math.inf  # from pages that are not locked into a staging buffer
    issues_meanwhile: bool = True  # calls kernels while others run; a CPU does one after the other
    float32_flops_per_s: float = math.inf
    kernels: Mapping[str, KernelRates] = field(default_factory=dict)  # of packed formats

    def kernel(self, packed: PackedLoad) -> KernelRates:
        """Return what was measured of a format's kernel; else it reads as memory allows.

        It is then taken to compute as fast as a card's products, or in float32 on a CPU.
        """
        per_byte = packed.num_weights / packed.num_bytes
        flops_per_s = self.flops_per_s if self.issues_meanwhile else self.float32_flops_per_s
        assumed = KernelRates(one_row=per_byte * self.memory_bytes_per_s, each_row=flops_per_s / 2)
        return self.kernels.get(packed.packed_format, assumed)

    def from_ram(self, *, are_staged: bool) -> float:
        """Return the bytes a second from RAM to the device."""
        return min(self.link_bytes_per_s, self.staging_bytes_per_s) if are_staged else self.link_bytes_per_s

    def with_calls(self, kernels_s: float, calls_s: float) -> float:
        """Return the seconds of kernels that take so long to call."""
        return max(kernels_s, calls_s) if self.issues_meanwhile else kernels_s + calls_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoad:
    """Weights of one format that a kernel multiplies as they are packed."""

    packed_format: str
    num_weights: int
    num_bytes: int
    unpacked_bytes: int  # written and read again for more than `max_rows` rows
    max_rows: int = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """The experts of a mixture that move on demand, alike in all of its layers."""

    num_layers: int  # that have experts
    num_experts: int  # of a layer
    chosen: int  # by a row
    expert_bytes: float  # as stored
    unpacked_bytes: float  # of an expert: written and read again, where weights are packed or converted
    row_flops: float  # of an expert, for one row
    device_kept: float  # of a layer's experts, in the device's memory
    ram_kept: float  # in RAM, those on the device among them; what is not there is read from disk
    is_on_host: bool = False  # the CPU computes all of them
    multiplied: PackedLoad | None = None  # an expert whose weights the device's kernel multiplies as they are packed
    host_multiplies: bool = False  # whether the CPU beside the device has such a kernel
    between_bytes: float = 0.0  # of an expert, as a model's
    are_staged: bool = False  # those in RAM are not locked: they pass through staging buffers, and none stays there
    in_layers: bool = False  # of a card: where rows choose many, all of a layer are unpacked, and multiplied in a loop

    @property
    def all_bytes(self) -> float:
        """The bytes of all experts of all layers."""
        return self.num_layers * self.num_experts * self.expert_bytes

    def routing(self, spread: float) -> Routing:
        """Return the choice of experts in a layer."""
        return Routing(num_experts=self.num_experts, chosen=self.chosen, spread=spread)

    def host(self, rates: Rates) -> HostRates:
        """Return the rates at which such experts are moved, or computed by the CPU.

        It unpacks packed ones that it has no kernel for.
        """
        read_s = self.expert_bytes / rates.host_bytes_per_s
        if self.unpacked_bytes and not self.host_multiplies:
            read_s = max(read_s, self.row_flops / 2 / rates.host_unpack_weights_per_s)
        return HostRates(
            link_bytes_per_s=rates.from_ram(are_staged=self.are_staged),
            bytes_per_s=self.expert_bytes / read_s,
            flops_per_s=rates.host_flops_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """The bytes that one pass of a model moves, and what it computes; of a mixture, all but its `experts`."""

    num_layers: int
    resident_bytes: int  # decoder layers that stay on the device
    ram_bytes: int  # decoder layers that are copied over the link
    disk_bytes: int  # decoder layers that are read from disk
    unpacked_bytes: int  # written and read again, where weights are packed or converted, and not `multiplied`
    cache_bytes: int  # keys and values that are read
    row_flops: float  # of all decoder layers, for one row; without weights that are `multiplied`
    head_bytes: int
    head_row_flops: float
    head_rows: int  # that the head takes at once
    experts: ExpertLoad | None = None
    between_bytes: int = 0  # that unpacking by several operations moves beside packed and unpacked weights
    staged_bytes: int = 0  # of those in RAM: not locked, so that they pass through staging buffers
    waiting_bytes: int = 0  # keys and values that are copied over the link, those that go back included
    is_recorded: bool = False  # its calls are replayed, so that a pass takes the host as long as one layer does
    multiplied: tuple[PackedLoad, ...] = ()  # whose bytes are among the layers'

    @property
    def layer_bytes(self) -> int:
        """The bytes of all decoder layers as they are stored."""
        return self.resident_bytes + self.ram_bytes + self.disk_bytes


def achieved_rates(hardware: Hardware, achieved: Achieved, assumptions: Assumptions, *, half: bool) -> Rates:
    """Return the data sheet's rates times the shares of them that are reached; `half` is for bf16 and fp16.

    `assumptions` say what is beside the device.
    """
    return Rates(
        memory_bytes_per_s=achieved.memory * hardware.weight_bytes_per_s(half=half),
        flops_per_s=achieved.compute * hardware.flops_per_s(half=half),
        link_bytes_per_s=achieved.link * hardware.link_bytes_per_s,
        disk_bytes_per_s=achieved.disk * assumptions.host_disk_bytes_per_s,
        layer_call_s=achieved.layer_call_s,
        expert_call_s=achieved.expert_call_s,
        expert_spread=achieved.expert_spread,
        host_bytes_per_s=assumptions.host_memory_bytes_per_s,
        host_unpack_weights_per_s=assumptions.host_unpack_weights_per_s,
        host_flops_per_s=assumptions.host_flops_per_s,
        kernel_rows=achieved.kernel_rows if hardware.device != "cpu" else 0.0,
        staging_bytes_per_s=assumptions.host_staging_bytes_per_s,
        noise_number_s=achieved.noise_number_s if hardware.device != "cpu" else 0.0,
        issues_meanwhile=hardware.device != "cpu",
        float32_flops_per_s=achieved.compute * hardware.flops_per_s(half=False),
        # They are measured with one row and with a tree's, and reach the same share with both.
        kernels={name: found.scaled(achieved.memory) for name, found in hardware.kernels.items()},
    )


def stream_s(load: ModelLoad, rates: Rates) -> float:
    """Return the seconds until the last streamed layer is there; the disk reads while other layers are copied."""
    link_s = (load.ram_bytes + load.disk_bytes + load.waiting_bytes - load.staged_bytes) / rates.link_bytes_per_s
    link_s += load.staged_bytes / rates.from_ram(are_staged=True)
    return max(link_s, load.disk_bytes / rates.disk_bytes_per_s)


def compute_s(load: ModelLoad, rates: Rates, *, rows: int) -> float:
    """Return the seconds of the layers' kernels for so many rows; the host may need longer to issue them."""
    multiplied_bytes = sum(packed.num_bytes for packed in load.multiplied)
    read_bytes = load.layer_bytes - multiplied_bytes + load.unpacked_bytes + load.cache_bytes
    products_s = max(read_bytes / rates.memory_bytes_per_s, rows * load.row_flops / rates.flops_per_s)
    unpack_s = (load.unpacked_bytes + load.between_bytes) / rates.memory_bytes_per_s
    multiply_s = sum(packed_s(packed, rates, rows=rows) for packed in load.multiplied)
    num_issued = 1 if load.is_recorded else load.num_layers
    return rates.with_calls(unpack_s + products_s + multiply_s, num_issued * rates.layer_call_s)


def packed_s(packed: PackedLoad, rates: Rates, *, rows: float) -> float:
    """Return the seconds of products with packed weights: by their kernel, or with more rows by unpacking them."""
    kernel, most_rows = rates.kernel(packed), min(rows, max(packed.max_rows, rates.kernel_rows))
    kernel_s = packed.num_weights * max(1 / kernel.one_row, most_rows / kernel.each_row)
    if most_rows == rows:
        return kernel_s
    read_bytes = packed.num_bytes + packed.unpacked_bytes
    products_s = max(read_bytes / rates.memory_bytes_per_s, rows * 2 * packed.num_weights / rates.flops_per_s)
    return max(kernel_s, packed.unpacked_bytes / rates.memory_bytes_per_s + products_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSeconds:
    """The experts that a pass asks for in all layers, and the seconds that they add."""

    asked: float
    in_place: float  # of these, computed by the CPU where they lie
    link_bytes: float  # of those that are not on the device, from RAM
    disk_bytes: float
    elsewhere_s: float  # until those that are not on the device have come, or their rows have been there and back
    compute_s: float

    @property
    def seconds(self) -> float:
        """The longer of both: copies and arithmetic overlap."""
        return max(self.elsewhere_s, self.compute_s)


def expert_seconds(load: ExpertLoad, rates: Rates, *, rows: int, num_texts: int = 1) -> ExpertSeconds:
    """Return what the experts add to a pass of so many rows of `num_texts` texts, each expert moved once for all.

    Those that wait in RAM move, or are computed there, as takes less time for the rows of the average expert.
    """
    routing = load.routing(rates.expert_spread)
    asked, call_s = load.num_layers * routing.distinct(rows, num_texts=num_texts), rates.expert_call_s
    are_together = load.in_layers and FEW * load.chosen * rows >= load.num_experts
    if are_together:
        asked, call_s = load.num_layers * load.num_experts, call_s / LOOP_SHARE
    not_on_device, not_in_ram = (
        load.num_layers * routing.fetched(rows, kept=kept, num_texts=num_texts)
        for kept in (load.device_kept, load.ram_kept)
    )
    from_ram = max(0.0, not_on_device - not_in_ram)
    host, rows_each = load.host(rates), load.num_layers * load.chosen * rows / asked
    move_s = host.move_s(load.expert_bytes)
    host_s = host.host_s(load.expert_bytes, row_flops=load.row_flops, rows=rows_each)
    here_s = move_s if load.are_staged else min(move_s, host_s)
    disk_bytes = not_in_ram * load.expert_bytes
    stay = not load.are_staged and host.stays(load.expert_bytes, row_flops=load.row_flops, rows=rows_each)
    in_place = from_ram if stay else 0.0
    elsewhere_s = from_ram * here_s + disk_bytes / min(rates.disk_bytes_per_s, rates.link_bytes_per_s)
    if load.is_on_host:
        in_place = asked
        elsewhere_s = asked * host_s + disk_bytes / rates.disk_bytes_per_s
    if load.multiplied is not None and not are_together:
        kernels_s = asked * packed_s(load.multiplied, rates, rows=rows_each)
    else:
        unpack_s = asked * (load.unpacked_bytes + load.between_bytes) / rates.memory_bytes_per_s
        read_s = asked * (load.expert_bytes + load.unpacked_bytes) / rates.memory_bytes_per_s
        products_s = load.num_layers * load.chosen * rows * load.row_flops / rates.flops_per_s
        kernels_s = unpack_s + max(read_s, products_s)
    return ExpertSeconds(
        asked=asked,
        in_place=in_place,
        link_bytes=0.0 if in_place else from_ram * load.expert_bytes,
        disk_bytes=disk_bytes,
        elsewhere_s=elsewhere_s,
        compute_s=rates.with_calls(kernels_s, asked * call_s),
    )


def noise_s(rates: Rates, *, vocab: int, positions: float) -> float:
    """Return the seconds until other threads have made the noise of so many positions of all texts together."""
    return positions * vocab * rates.noise_number_s


def head_s(load: ModelLoad, rates: Rates, *, rows: int) -> float:
    """Return the seconds of logits of so many rows at once: the head's matrix is read once for every `head_rows`."""
    read_bytes = math.ceil(rows / load.head_rows) * load.head_bytes
    return max(read_bytes / rates.memory_bytes_per_s, rows * load.head_row_flops / rates.flops_per_s)


def layers_s(load: ModelLoad, rates: Rates, *, rows: int, num_texts: int = 1) -> float:
    """Return the seconds of all decoder layers: max(stream, compute), and what experts on demand add."""
    experts_s = expert_seconds(load.experts, rates, rows=rows, num_texts=num_texts).seconds if load.experts else 0.0
    return max(stream_s(load, rates), compute_s(load, rates, rows=rows)) + experts_s


def verify_s(load: ModelLoad, rates: Rates, *, rows: int, head_calls: float = 1.0, num_texts: int = 1) -> float:
    """Return the seconds of a target's pass over the trees of `num_texts` texts: the layers, then the head.

    The head computes row by row along the accepted path.
    """
    return layers_s(load, rates, rows=rows, num_texts=num_texts) + head_calls * head_s(load, rates, rows=1)


def draft_call_s(load: ModelLoad, rates: Rates, *, width: int, num_texts: int = 1) -> float:
    """Return the seconds of a tree's layer of `width` nodes: a resident draft's call, all logits, and choosing."""
    grow_s = GROWN_LAYERS * rates.layer_call_s if rates.issues_meanwhile else 0.0
    return layers_s(load, rates, rows=width, num_texts=num_texts) + head_s(load, rates, rows=width) + grow_s
