"""The index by which a layer chooses its keys: milliseconds and memory at long contexts, beside the layer's own.

    python -m scripts.bench.indexed
    python -m scripts.bench.indexed --types glm_moe_dsa --contexts 2000 32000 --rows 1 64 512

One decoder layer of each type, random, in bfloat16: one that chooses keys, or blocks of them. Its index has the
published size; attention has 8 heads and no mixture follows it, or one of four experts, so that a CPU can run it. A
text's cache is filled with random rows, and then a pass reads a row, a tree of 64, or 512 rows of a prompt. Each cell
is a process of its own: the peak of its memory above what was there before the pass. Prints a table and a JSON line.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from edgespec.machine.device import keeps_row_bits
from edgespec.model.causal_model import CausalModel
from edgespec.model.mechanisms.known import key_shape, row_numbers
from edgespec.model.pass_rows import PassRows
from edgespec.model.text_cache import TextCache
from offload.text_part import decoder_layers, model_from_config

TYPES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note_text", "qwen4_exp_text",
         "minimax_m3_vl_text", "glm5_next", "deepseek_v4")  # fmt: skip
# What types that choose blocks of places need beside the rest; Qwen 4's numbers are those of Qwen3.8-Flash-Next
BLOCKS: dict[str, dict[str, Any]] = {
    "qwen4_exp_text": {
        "layer_types": ["indexed_attention"], "hidden_size": 2560, "head_dim": 256, "num_key_value_heads": 2,
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
        "indexer_compress_ratio": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10]},
    },
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["dense"], "dense_intermediate_size": 512,
        "num_key_value_heads": 4,
    },
    "dots3_note_text": {"layer_types": ["indexed_attention"], "mlp_layer_types": ["dense"]},
    "glm5_next": {"layer_types": ["indexed_attention"], "indexer_types": ["full"], "mlp_layer_types": ["dense"]},
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"], "num_key_value_heads": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 128,
    },
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "projection_intermediate_size": 16}
PIXTRAL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "head_dim": 8}
CONTEXTS = (2000, 8000, 32000)
ROWS = (1, 64, 512)
REPEATS = 3
HEADS = 8
VOCAB = 256
SEED = 1
KIB = 1024


def one_layer(model_type: str) -> PretrainedConfig:
    """The published configuration with one dense layer, few heads of attention, and a small vocabulary."""
    if model_type in BLOCKS:
        sizes = {"num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
        text = {**sizes, "intermediate_size": 512, "vocab_size": VOCAB, "pad_token_id": None, **BLOCKS[model_type]}
        if model_type == "glm5_next":  # which has no model of words alone
            return AutoConfig.for_model(model_type, text_config=text, vision_config=VISION)
        return AutoConfig.for_model(model_type, **text)
    published = AutoConfig.for_model(model_type).get_text_config()
    kept = {
        name: getattr(published, name)
        for name in ("index_topk", "index_n_heads", "index_head_dim", "hidden_size", "kv_lora_rank", "q_lora_rank",
                     "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        if getattr(published, name, None)
    }  # fmt: skip
    text = {
        **kept, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "mlp_layer_types": ["dense"], "intermediate_size": 512, "vocab_size": VOCAB, "pad_token_id": None,
    }  # fmt: skip
    if model_type == "mistral_large4":  # which has no model of words alone
        return AutoConfig.for_model(model_type, text_config=text, vision_config=PIXTRAL)
    return AutoConfig.for_model(model_type, **text)


def filled(causal: CausalModel, config: PretrainedConfig, rows: int) -> TextCache:
    """A text of so many random rows."""
    cache = causal.new_text()
    shape = key_shape(config, 0)
    widths = (shape.key_width, shape.value_width)
    keys = [torch.randn(1, shape.heads, rows, width, dtype=causal.model.dtype) for width in widths]
    has_latents = getattr(config, "kv_lora_rank", None)
    cache.layers[0].append(*(keys[::-1] if has_latents else keys))  # latents come before what is rotated
    cache.index_keys(0).append_rows(torch.randn(rows, row_numbers(config)[2], dtype=causal.model.dtype))
    cache.commit_next([0] * rows)
    return cache


def siblings(cache: TextCache, rows: int) -> PassRows:
    """Rows of which all others are children of the first."""
    first = torch.tensor([0])
    return PassRows(
        cache=cache,
        ids=torch.randint(VOCAB, (rows,)),  # rows that choose alike would be read in less time
        positions=torch.full((rows,), cache.length + 1).index_fill_(0, first, cache.length),
        visible=torch.eye(rows, dtype=torch.bool).index_fill_(1, first, value=True),
    )


def measured(model_type: str, context: int, rows: int, threads: int) -> dict[str, Any]:
    """Milliseconds of the index and of the layer, and the peak of memory, for rows that are all the root's children."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    config = one_layer(model_type)
    model = model_from_config(config, dtype=torch.bfloat16).eval()
    device = torch.device("cpu")
    causal = CausalModel(model, device=device, keeps_row_bits=keeps_row_bits(model.dtype, device))
    config = causal.config
    cache = filled(causal, config, context)
    spent: list[float] = []
    attention: Any = decoder_layers(model)[1][0].self_attn
    indexer = getattr(attention, "compressor", None) or attention.indexer  # the compressor has one
    chosen = indexer.forward

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = chosen(*arguments, **named)
        spent.append(time.perf_counter() - began)
        return found

    indexer.forward = timed
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    passes_s = []
    for _ in range(REPEATS):
        part = siblings(cache, rows)
        began = time.perf_counter()
        causal.read([part])
        passes_s.append(time.perf_counter() - began)
        cache.truncate()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "type": model_type, "context": context, "rows": rows, "index_ms": 1000 * statistics.median(spent),
        "layer_ms": 1000 * statistics.median(passes_s), "peak_mib": (peak_kib - before_kib) / KIB,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    found = []
    print("| type | context | rows | index, ms | layer, ms | peak, MiB |\n| --- | --- | --- | --- | --- | --- |")
    for model_type in arguments.types:
        for context in arguments.contexts:
            for rows in arguments.rows:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    cell = pool.apply(measured, (model_type, context, rows, arguments.threads))
                found.append(cell)
                print(
                    f"| {model_type} | {context} | {rows} | {cell['index_ms']:.1f} | {cell['layer_ms']:.0f} "
                    f"| {cell['peak_mib']:.0f} |",
                    flush=True,
                )
    print(json.dumps({"bench": "indexed", "cells": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
