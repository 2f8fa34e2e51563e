"""The list of compute layouts; which one a weight is in, is multiplied in, and is put in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from offload.checkpoint import Pieces
from offload.formats.bitsandbytes_4bit import NF4
from offload.formats.bitsandbytes_int8 import INT8
from offload.formats.known import FORMATS, PART_LEAVES
from offload.formats.storage import PackedStorage, Quantizer, StoredParameter
from offload.layouts.bitsandbytes import BITSANDBYTES_4BIT, BITSANDBYTES_INT8
from offload.layouts.byte_lanes import BYTE_LANES_LAYOUT
from offload.layouts.float8 import FLOAT8
from offload.layouts.gguf_blocks import GGUF_BLOCKS
from offload.layouts.int4 import INT4, INT4_LAYOUT
from offload.layouts.layout import ComputeLayout, Kernel, LosslessLayout
from offload.layouts.nf4_cpu import NF4_CPU, NF4_CPU_LAYOUT
from offload.layouts.transposed import detect_transposed
from offload.layouts.two_terms import FP4_TWICE_LAYOUT, INT4_TWICE_LAYOUT

# The `quant` that puts weights in layouts that have their numbers; all others stay in their files
REPACKED = "repacked"
QUANTIZERS: tuple[Quantizer, ...] = (INT8, NF4, NF4_CPU, INT4)  # what weights may be rounded to
# The first that takes a weight multiplies it, and the first that has all of its numbers is what it is put in
LAYOUTS: tuple[ComputeLayout, ...] = (
    BITSANDBYTES_INT8, BITSANDBYTES_4BIT, NF4_CPU_LAYOUT, INT4_LAYOUT, BYTE_LANES_LAYOUT, FP4_TWICE_LAYOUT,
    INT4_TWICE_LAYOUT, GGUF_BLOCKS, FLOAT8,
)  # fmt: skip
LOSSLESS = tuple(layout for layout in LAYOUTS if isinstance(layout, LosslessLayout))


def storage_of(
    parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces], stated: Mapping[str, Any]
) -> PackedStorage | None:
    """Return how a checkpoint packs the parameter; None where it is not packed, or not stored at all.

    `stated` is what config.json says of the packing. Raises CheckpointError for a packing that is not understood.
    """
    weight = StoredParameter(name=parameter, shape=shape, stored=stored, stated=stated)
    finders: list[Callable[[StoredParameter], PackedStorage | None]] = [layout.detect for layout in LOSSLESS]
    finders += [partial(detect_transposed, detect) for detect in finders] + [known.detect for known in FORMATS]
    found = next(filter(None, (find(weight) for find in finders)), None)
    part = next(filter(weight.has, PART_LEAVES), None)
    if found is None and part is not None and parameter not in stored:
        method = stated.get("quant_method") or "no quant_method"
        raise weight.cannot_be_used(f"it is stored in parts like '{part}', and config.json states {method}")
    return found


def kernel_of(stored: PackedStorage, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return what multiplies rows of a dtype with such a weight as it is stored; None where nothing does."""
    return next(filter(None, (layout.kernel(stored, shape, dtype, device) for layout in LAYOUTS)), None)


def quantizer(name: str) -> Quantizer:
    """Return what rounds weights to the format of this name."""
    return {known.name: known for known in QUANTIZERS}[name]


def layouts_in_files(quant: str) -> tuple[LosslessLayout, ...]:
    """Return the layouts that packed weights may be put in: the one of this name, or all for REPACKED."""
    return tuple(layout for layout in LOSSLESS if quant in {REPACKED, layout.own.name})
