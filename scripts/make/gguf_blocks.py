"""Blocks of each of GGML's types and the float32 numbers that the gguf library makes of them, for the tests.

    pip install gguf
    python -m scripts.make.gguf_blocks

Bytes are random, and scales finite; the first block has the smallest of all.
"""

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.block_scales import HALVES

OUT = Path(__file__).parents[2] / "tests/offload/formats/gguf_blocks.safetensors"
WEIGHTS = 512  # of each type
FIRST = np.float16([6e-8])  # the smallest of all


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from gguf import GGMLQuantizationType, quants  # type: ignore[import-not-found]

    random, tensors = np.random.default_rng(0), {}
    for name, places in HALVES.items():
        kind = GGMLQuantizationType[name]
        weights, num_bytes = quants.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (WEIGHTS // weights, num_bytes), dtype=np.uint8)
        if name in {"BF16", "F32"}:
            blocks[:, -1] &= 0xBF  # finite
        if name == "IQ1_M":
            blocks[:, -1] &= 0xEF  # of its scale, whose bits lie in four pieces
        for place in places:
            halves = blocks[:, place : place + 2].copy().view(np.float16)
            halves[~np.isfinite(halves)] = 1
            halves[0] = FIRST
            blocks[:, place : place + 2] = halves.view(np.uint8)
        with np.errstate(all="ignore"):
            numbers = quants.dequantize(blocks.reshape(-1), kind)
        tensors |= {f"{name}.blocks": blocks, f"{name}.numbers": numbers.astype(np.float32).reshape(-1, weights)}
    save_file(tensors, OUT)


if __name__ == "__main__":
    main()
