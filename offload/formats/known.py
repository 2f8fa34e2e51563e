"""The list of packed formats, and which of them a weight is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.formats.bitsandbytes_4bit import FP4, NF4
from offload.formats.bitsandbytes_int8 import INT8
from offload.formats.fp4 import MXFP4, NVFP4
from offload.formats.gguf import GGUF
from offload.formats.packed_format import Keeper, PackedFormat, Packer, Packing, StoredParameter
from offload.formats.scaled import FP8, INT_QUANTIZED
from offload.formats.words import AWQ, GPTQ, PACK_QUANTIZED
from offload.layouts.int4 import INT4
from offload.layouts.nf4_cpu import NF4_CPU
from offload.layouts.transposed import TurnedFormat
from offload.layouts.two_terms import FP4_TWICE, INT4_TWICE
from offload.stored_names import PART_LEAVES, Pieces

KEPT = "kept"  # weights whose numbers a keeper's format has are packed in it; all others stay in their files
PACKERS: tuple[Packer, ...] = (INT8, NF4, NF4_CPU, INT4)
KEEPERS: tuple[Keeper, ...] = (*PACKERS, FP4_TWICE, INT4_TWICE)  # the first that has a weight's numbers keeps them
FORMATS: tuple[PackedFormat, ...] = (
    *KEEPERS, *(TurnedFormat(of=keeper) for keeper in KEEPERS),
    FP4, FP8, INT_QUANTIZED, NVFP4, MXFP4, PACK_QUANTIZED, GPTQ, AWQ, GGUF,
)  # fmt: skip


def packing_of(
    parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces], stated: Mapping[str, Any]
) -> Packing | None:
    """Return how a checkpoint packs the parameter; None where it is a plain tensor, or not stored at all.

    `stated` is what config.json says of the packing. Raises CheckpointError for a packing that is not understood.
    """
    weight = StoredParameter(name=parameter, shape=shape, stored=stored, stated=stated)
    packing = next((found for known in FORMATS if (found := known.detect(weight)) is not None), None)
    part = next(filter(weight.has, PART_LEAVES), None)
    if packing is None and part is not None and parameter not in stored:
        method = stated.get("quant_method") or "no quant_method"
        raise weight.cannot_be_used(f"it is stored in parts like '{part}', and config.json states {method}")
    return packing


def format_to_pack(name: str) -> Packer:
    """Return the format of this name to pack weights in."""
    return {known.name: known for known in PACKERS}[name]


def formats_to_keep_in(quant: str) -> tuple[Keeper, ...]:
    """Return the formats in which packed weights may keep their numbers: the one of this name, or all for KEPT."""
    return KEEPERS if quant == KEPT else (format_to_pack(quant),)


def readable_methods() -> tuple[str, ...]:
    """Return what config.json may state as `quant_method`, each once."""
    return tuple(dict.fromkeys(method for known in FORMATS for method in known.methods))


def readable_formats() -> str:
    """Return the formats for a message to a user: 'int8, nf4, ...'."""
    return ", ".join(dict.fromkeys(known.name for known in FORMATS))
