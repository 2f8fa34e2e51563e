"""Where an expert is computed: on the device, to which its weights move, or on the host, where they lie.

    move_s = bytes / link
    host_s = max(bytes / host, rows * FLOP of a row / host's arithmetic)

Few rows of a large expert are sooner moved to its weights than the weights to the rows. This is pure arithmetic.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """The bytes and operations of experts in a second, while they are moved and while the host computes them."""

    link_bytes_per_s: float  # to the device
    bytes_per_s: float  # as stored, that the host computes with: read, and unpacked where they are packed
    flops_per_s: float

    def move_s(self, expert_bytes: float) -> float:
        """Return the seconds until an expert is on the device."""
        return expert_bytes / self.link_bytes_per_s

    def host_s(self, expert_bytes: float, *, row_flops: float, rows: float) -> float:
        """Return the seconds that the host takes for an expert's rows."""
        return max(expert_bytes / self.bytes_per_s, rows * row_flops / self.flops_per_s)

    def stays(self, expert_bytes: float, *, row_flops: float, rows: float) -> bool:
        """Return whether an expert's rows are computed sooner on the host."""
        return self.host_s(expert_bytes, row_flops=row_flops, rows=rows) < self.move_s(expert_bytes)
