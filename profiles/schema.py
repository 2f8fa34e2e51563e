"""What a profile records about a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The machine and the software that a measurement was made with."""

    system: str
    processor: str
    num_cores: int
    memory_bytes: int
    accelerator: str | None
    accelerator_bytes: int | None
    python: str
    versions: dict[str, str]  # package -> version
