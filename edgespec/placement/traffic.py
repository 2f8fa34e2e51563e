"""What a card moves to unpack weights by torch's operations: counted, as each reads and writes its tensors."""

import math
import sys

import torch

from offload.formats import gguf_blocks, gguf_kernel
from offload.formats.published import PublishedWeight
from offload.packed_weight import PackedModule

# Bytes a weight where a card unpacks it into 16 bits; those of formats that are not named are read and written once.
TRAFFIC_BYTES = {
    "gptq": 8.4, "awq": 8.4, "pack-quantized": 7.4, "fp8": 7.3, "mxfp4": 10.8, "nvfp4": 11.6, "int4": 32.1, "int8": 3.0,
    "Q4_0": 26.3, "Q4_1": 32.6, "Q5_0": 31.7, "Q5_1": 38.0, "Q8_0": 19.3, "Q2_K": 36.3, "Q3_K": 41.0, "Q4_K": 33.8,
    "Q5_K": 45.1, "Q6_K": 38.6, "IQ1_S": 32.6, "IQ1_M": 32.0, "IQ2_XXS": 31.1, "IQ2_XS": 31.7, "IQ2_S": 34.7,
    "IQ3_XXS": 32.2, "IQ3_S": 39.7, "IQ4_NL": 25.9, "IQ4_XS": 26.8, "TQ1_0": 35.5, "TQ2_0": 27.5, "MXFP4": 27.5,
    "NVFP4": 26.9,
}  # fmt: skip
ACT_ORDER_BYTES = 14.3  # where columns of a group are no neighbours


def between_bytes(module: PackedModule, dtype: torch.dtype, device: torch.device) -> int:
    """Return what a card moves to unpack a module's weights, beside reading packed and writing unpacked ones.

    That is nothing where the format has a kernel of Triton, which comes with torch on Linux.
    """
    if device.type != "cuda":
        return 0
    found = 0.0
    for _, weight in module.weights:
        packing, count = weight.packing, math.prod(weight.shape)
        if sys.platform == "linux" and isinstance(packing, PublishedWeight) and _has_kernel(packing):
            continue
        steps, traffic = packing.even_steps, max(TRAFFIC_BYTES.get(name, 0.0) for name in packing.name.split(", "))
        if traffic and steps is not None and not steps.in_order:
            traffic = ACT_ORDER_BYTES
        found += max(0.0, traffic * count - weight.num_bytes - dtype.itemsize * count)
    return int(found)


def _has_kernel(packing: PublishedWeight) -> bool:
    """Return whether a kernel of Triton unpacks a weight: others of GGUF's types have code for a CPU alone."""
    without = gguf_blocks.TYPES.keys() - gguf_kernel.NAMES
    return packing.has_kernel is not None and without.isdisjoint(packing.name.split(", "))
