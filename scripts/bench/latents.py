"""Latent attention without an index: latents read as they are kept, beside latents expanded to keys and values.

    python -m scripts.bench.latents
    python -m scripts.bench.latents --types glm4_moe_lite --contexts 8000 --rows 1 64 --repeats 5

One random decoder layer with the attention of each type, in the CPU's default, float32, and a small dense block behind
it. A text's cache is filled with random rows; then passes read a row, or a tree whose rows are all children of one,
in turn in both ways. Prints the medians, which of the two edgespec takes, and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from edgespec.model.causal_model import CausalModel
from edgespec.model.mechanisms import latents as latent_attention
from offload.text_part import model_from_config
from scripts.bench.indexed import VOCAB, filled, siblings

# The published sizes of attention, where they are not those of the configuration's defaults
TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
    "glm4_moe_lite": {},
    "deepseek_v3": {},
}
CONTEXTS = (200, 2000, 8000)
ROWS = (1, 16, 64, 256)
REPEATS = 3
SEED = 1


def one_layer(model_type: str) -> PretrainedConfig:
    """The configuration with one dense layer and a small vocabulary."""
    small = {"num_hidden_layers": 1, "intermediate_size": 512, "vocab_size": VOCAB, "pad_token_id": None}
    dense = {"mlp_layer_types": ["dense"], "first_k_dense_replace": 1}
    return AutoConfig.for_model(model_type, **small, **dense, **TYPES[model_type])


def measured(causal: CausalModel, context: int, rows: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a pass with latents expanded, and as they are, and which of them is taken."""
    cache = filled(causal, causal.config, context)
    chooses, chosen = latent_attention._costs_less, set()

    def noted(*given: Any) -> bool:
        chosen.add(chooses(*given))
        return chooses(*given)

    passes_s: dict[bool, list[float]] = {True: [], False: []}
    try:
        latent_attention._costs_less = noted
        causal.read([siblings(cache, rows)])
        for _ in range(repeats):
            for as_they_are, spent in passes_s.items():
                latent_attention._costs_less = lambda *_, answer=as_they_are: answer  # type: ignore[misc]
                cache.truncate()
                part = siblings(cache, rows)
                began = time.perf_counter()
                causal.read([part])
                spent.append(time.perf_counter() - began)
    finally:
        latent_attention._costs_less = chooses
    expanded_ms, kept_ms = (1000 * statistics.median(passes_s[key]) for key in (False, True))
    return {
        "context": context, "rows": rows, "expanded_ms": expanded_ms, "kept_ms": kept_ms, "takes_kept": chosen.pop(),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    found = []
    print("| type | context | rows | expanded, ms | as they are, ms | taken |\n| --- | --- | --- | --- | --- | --- |")
    for model_type in arguments.types:
        model = model_from_config(one_layer(model_type), dtype=torch.float32).eval()
        causal = CausalModel(model, device=torch.device("cpu"))
        for context in arguments.contexts:
            for rows in arguments.rows:
                cell = measured(causal, context, rows, arguments.repeats)
                found.append({"type": model_type, **cell})
                taken = "as they are" if cell["takes_kept"] else "expanded"
                print(
                    f"| {model_type} | {context} | {rows} | {cell['expanded_ms']:.1f} | {cell['kept_ms']:.1f} "
                    f"| {taken} |",
                    flush=True,
                )
        causal.close()
    print(json.dumps({"bench": "latents", "cells": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
