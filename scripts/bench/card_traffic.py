"""Launches and bytes of traffic a weight of what a card computes with packed weights: counted without a card.

    python -m scripts.bench.card_traffic

An expert of gpt-oss-120b (MXFP4) that is unpacked by torch's operations; with Triton a card unpacks each of its two
matrices by one launch, which reads and writes 2.6 bytes a weight. And a layer of Llama-3-70B in nf4 for some rows:
which share of its weights is multiplied as it is packed, by bitsandbytes' rule for an RTX 4090. Every other weight is
read, written and read again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
from unittest.mock import patch

import torch

from offload.checkpoint import TensorEntry
from offload.formats import published
from offload.formats.bitsandbytes_4bit import NF4
from offload.layouts.bitsandbytes import most_rows
from offload.layouts.known import kernel_of, storage_of
from scripts.bench.launches import Traffic

HIDDEN = 2880
RTX_4090 = (128, 8, 9)  # multiprocessors, and the compute capability
LAYER = ((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672))
PACKED_BYTES, UNPACKED_BYTES = 0.52, 4.52  # of a weight


def unpacked_expert() -> dict[str, float]:
    """Return what unpacking one expert's two matrices takes."""
    published.WEIGHTS_AT_ONCE_ON_CPU = published.WEIGHTS_AT_ONCE_ON_GPU
    launches = num_bytes = 0
    for rows in (2 * HIDDEN, HIDDEN):
        blocks = torch.zeros(1, rows, HIDDEN // 32, 16, dtype=torch.uint8)
        scales = torch.full((1, rows, HIDDEN // 32), 127).to(torch.uint8)
        stored = {
            f"e_{name}": (TensorEntry.planned(f"e_{name}", tuple(part.shape), part.dtype),)
            for name, part in (("blocks", blocks), ("scales", scales))
        }
        packing = storage_of("e", (1, HIDDEN, rows), stored, {"quant_method": "mxfp4"})
        assert packing is not None
        assert packing.transposed is not None
        out = torch.empty(1, rows, HIDDEN, dtype=torch.bfloat16)
        parts = {"packed": blocks, "scale": scales}
        packing.transposed.unpack(parts, out)  # makes the table
        with Traffic() as traffic:
            packing.transposed.unpack(parts, out)
        launches, num_bytes = launches + traffic.count, num_bytes + traffic.num_bytes
    return {"launches": launches, "bytes_a_weight": round(num_bytes / (3 * HIDDEN**2), 1)}


def nf4_layer(rows: int) -> dict[str, float]:
    """Return the share of a layer's weights that so many rows are multiplied with as they are, and the traffic."""
    card = torch.device("cuda", 0)
    with patch.object(torch._C, "_cuda_getCurrentRawStream", create=True):
        operations = importlib.import_module("bitsandbytes.backends.cuda.ops")
    most_rows.cache_clear()
    with patch.object(operations, "_gpu_dispatch_props", lambda _device: RTX_4090):
        kernels = [kernel_of(NF4, shape, torch.bfloat16, card) for shape in LAYER]
    most_rows.cache_clear()
    as_packed = sum(n * k for (n, k), found in zip(LAYER, kernels, strict=True) if found and rows <= found.max_rows)
    share = as_packed / sum(n * k for n, k in LAYER)
    traffic = share * PACKED_BYTES + (1 - share) * UNPACKED_BYTES
    return {"rows": rows, "multiplied_as_packed": round(share, 3), "bytes_a_weight": round(traffic, 2)}


def main() -> None:
    """Count and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = {"expert": unpacked_expert(), "nf4_layer": [nf4_layer(rows) for rows in (1, 5, 64, 256)]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
