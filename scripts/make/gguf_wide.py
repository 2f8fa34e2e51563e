"""Write a GGUF file whose embedding and head have a 7B's shape, for measurements of memory: 152,064 tokens x 3584.

    pip install gguf
    python -m scripts.make.gguf_wide OUT.gguf
    python -m scripts.check.memory -m OUT.gguf --setting "--dtype bfloat16 -c 512 --max-cpu-mem 1300MiB"

The embedding is Q4_K and the head Q6_K, as in files of the recipe Q4_K_M: 0.70 GiB. Their bytes are random, with small
scales, and so are the few narrow layers: texts say nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

VOCAB, HIDDEN, HEADS, KEY_HEADS, INNER = 152_064, 3584, 28, 4, 512
HEAD_DIM = HIDDEN // HEADS
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}  # places of float16 numbers in a block
SCALE = np.float16(1e-4)


def random_blocks(kind: str, rows: int, columns: int, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return rows of blocks [rows, bytes] whose scales are small."""
    import gguf

    weights, num_bytes = gguf.quants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows, columns // weights, num_bytes), dtype=np.uint8)
    for place in SCALES[kind]:
        blocks[..., place : place + 2] = np.array([SCALE]).view(np.uint8)
    return blocks.reshape(rows, -1)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    import gguf

    random, types = np.random.default_rng(0), gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(arguments.out), "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(arguments.layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"token {number}" for number in range(len(letters), VOCAB - 1)), "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(VOCAB - 2)
    writer.add_add_bos_token(False)
    for name, kind in (("token_embd", "Q4_K"), ("output", "Q6_K")):
        writer.add_tensor(f"{name}.weight", random_blocks(kind, VOCAB, HIDDEN, random), raw_dtype=types[kind])
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (KEY_HEADS * HEAD_DIM, HIDDEN), "attn_v": (KEY_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    for layer in range(arguments.layers):
        for name, shape in shapes.items():
            blocks = random_blocks("Q4_K", *shape, random)
            writer.add_tensor(f"blk.{layer}.{name}.weight", blocks, raw_dtype=types.Q4_K)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
