"""The packed formats that are known, and how to tell which of them a weight is in."""

from __future__ import annotations

from collections.abc import Mapping

from offload.formats.bitsandbytes_4bit import FP4, NF4
from offload.formats.bitsandbytes_int8 import INT8
from offload.formats.packed_format import PackedFormat
from offload.stored_names import Pieces

FORMATS: tuple[PackedFormat, ...] = (INT8, NF4, FP4)


def packing_of(parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces]) -> PackedFormat | None:
    """Return how a checkpoint packs the parameter; None where it is a plain tensor, or not stored at all.

    Raises CheckpointError for a packing that is not understood.
    """
    found = (known.detect(parameter, shape, stored) for known in FORMATS)
    return next((packing for packing in found if packing is not None), None)


def format_to_pack(name: str) -> PackedFormat:
    """Return the format that `name` asks to pack weights in."""
    return {known.name: known for known in FORMATS if known.can_pack}[name]


def readable_methods() -> tuple[str, ...]:
    """Return what config.json may state as `quant_method`, each once."""
    return tuple(dict.fromkeys(known.method for known in FORMATS))


def readable_formats() -> str:
    """Return the formats for a message to a user: 'bitsandbytes int8, ...'."""
    return ", ".join(f"{known.method} {known.name}" for known in FORMATS)
