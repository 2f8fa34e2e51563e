"""What `edgespec estimate` says of published drafts on a card that is not here, from their config.json alone.

    python -m scripts.check.draft_estimates      GLM-4.5-Air with its own layer, Llama-3.3-70B with an EAGLE-3 head

The configs are those that the models are published with; published figures stand beside what is estimated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CARD = "rtx-4090"
GLM_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
EAGLE3_70B: dict[str, Any] = {  # of the target's own width
    **LLAMA_70B,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
MTP = (
    "the layer is one of the target's; chains of 3 yield 2.8 to 3.0 tokens a pass of Qwen3.x (vLLM recipes #839), 3.46 "
    "of GLM-5.2 (ATOM #1742)"
)
EAGLE3 = (
    "a head of this width has about 1.1 B parameters and 0.26 B of its language model head; chains of 7 yield 3.98 "
    "tokens a pass on MT-bench, 3.67 on code, 2.52 on GSM8K (SpecBundle, data.json)"
)
RUNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("glm-4.5-air",), "disk-bound, a layer gained nothing: it asks for 1,062 experts in place of 600 (colibri #640)"),
    (("glm-4.5-air", "-md", "mtp"), MTP),
    (("glm-4.5-air", "--quant", "nf4", "--draft-quant", "nf4"), MTP),
    (("llama-3.3-70b", "-md", "eagle3-70b", "--quant", "nf4"), EAGLE3),
)


def main() -> None:
    """Write the configs, and print what is estimated."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as work:
        configs = {"glm-4.5-air": GLM_AIR, "llama-3.3-70b": LLAMA_70B, "eagle3-70b": EAGLE3_70B}
        for name, config in configs.items():
            (Path(work) / name).mkdir()
            (Path(work) / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for options, published in RUNS:
            print(f"== {' '.join(options)}", flush=True)
            arguments = ["estimate", *options, "--hardware", CARD]
            subprocess.run([sys.executable, "-m", "edgespec", *arguments], cwd=work, check=True)
            print(f"published: {published}", flush=True)


if __name__ == "__main__":
    main()
