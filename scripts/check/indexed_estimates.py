"""What `edgespec estimate` says of models whose layers choose keys by an index, from their config.json alone.

    python -m scripts.check.indexed_estimates                  DeepSeek-V3.2, GLM-5, Qwen3.8-Flash-Next; 64 and 192 GiB
    python -m scripts.check.indexed_estimates --only qwen3.8-flash-next --quant nf4

The first two are transformers' own defaults of their types. Those of Qwen 4 are of no published model: they leave out
the index, without which no model can be built. Here are the numbers that Qwen3.8-Flash-Next is published with, as far
as they decide sizes. The system and the pages of files keep 8 GiB of RAM.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

CARD = "rtx-4090"
RAM_GIB = (64, 192)
SYSTEM_GIB = 8
LAYERS = 48
QWEN: dict[str, Any] = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen4_exp_text", "dtype": "bfloat16", "vocab_size": 248320, "hidden_size": 2560,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 262144, "eos_token_id": 248044, "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (LAYERS // 4),
        "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "output_gate_type": "sigmoid",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320,
        "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    },
    "vision_config": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2560,
        "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
MODELS: dict[str, dict[str, Any] | str] = {
    "deepseek-v3.2": "deepseek_v32",  # a type, whose defaults are the model's
    "glm-5": "glm_moe_dsa",
    "qwen3.8-flash-next": QWEN,
}


def config_of(name: str) -> dict[str, Any]:
    """Return a model's config.json."""
    known = MODELS[name]
    found: dict[str, Any] = AutoConfig.for_model(known).to_dict() if isinstance(known, str) else known
    return found


def main() -> None:
    """Write the configs, and print what is estimated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--ram", nargs="+", type=int, default=RAM_GIB, metavar="GIB")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--context", default="4096")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.only:
            (Path(work) / name).mkdir()
            (Path(work) / name / "config.json").write_text(json.dumps(config_of(name)), encoding="utf-8")
            for ram_gib in arguments.ram:
                options = [
                    "--hardware", CARD, "--max-cpu-mem", f"{ram_gib - SYSTEM_GIB}GiB", "--quant", arguments.quant,
                    "-c", arguments.context, "--prompt-tokens", "512",
                ]  # fmt: skip
                print(f"== {ram_gib} GiB of RAM: edgespec estimate {name} {' '.join(options)}", flush=True)
                command = [sys.executable, "-m", "edgespec", "estimate", str(Path(work) / name), *options]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
