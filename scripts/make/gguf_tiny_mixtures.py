"""The tiny mixtures and hybrids of `scripts.make.gguf_tiny`: name -> model type, fields beside its `SIZES`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHORT = {"bos_token_id": 62, "eos_token_id": 63, "pad_token_id": 63}  # of a short vocabulary
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 8}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "rope_theta": 10000.0,
}  # fmt: skip
LATENT = {
    "head_dim": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
WIDE = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}  # of a size that blocks fit
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1, "intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
MAMBA = {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 4, "mamba_n_groups": 2,
         "mamba_expand": 2}  # fmt: skip
GRANITE = {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.25,
           "logits_scaling": 8.0, "head_dim": 4}  # fmt: skip

# of powers of two, which round nothing
MULTIPLIERS = {
    "embedding_multiplier": 4.0, "lm_head_multiplier": 0.0625, "mlp_multipliers": [0.5, 0.25], "key_multiplier": 0.125,
    "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5, "ssm_in_multiplier": 0.25,
    "ssm_out_multiplier": 8.0, "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.125],
}  # fmt: skip

_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**LOCAL, "sliding_window": None}),
    "qwen2moe": (
        "qwen2_moe",
        {**MIXTURE, "shared_expert_intermediate_size": 12, "head_dim": 4, "norm_topk_prob": False},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **LOCAL,
            "sliding_window": 8,
            "rope_parameters": {**YARN, "truncate": False, "rope_theta": 150000.0},
            "max_position_embeddings": 256,
        },
    ),
    "glm4moe": (
        "glm4_moe",
        {
            **ROUTED,
            "num_nextn_predict_layers": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek2": (
        "deepseek_v2",
        {
            **ROUTED,
            **LATENT,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek3": (
        "deepseek_v3",
        {
            **ROUTED,
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            **LOCAL,
            "rotary_dim": 4,
            "use_qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granitemoe": ("granitemoeshared", {**LOCAL, **GRANITE, "shared_intermediate_size": 12}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            **MIXTURE,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "moe_layer_end_index": 1,
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {
            "num_experts": 4,
            "moe_topk": [2, 2],
            "moe_intermediate_size": [8, 8],
            "num_shared_expert": [1, 1],
            "intermediate_size": 8,
            "head_dim": 4,
        },
    ),
    "gpt-oss-mxfp4": (
        "gpt_oss",
        {
            **LOCAL,
            **WIDE,
            "sliding_window": 8,
            "num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "granitemoe-q8_0": (
        "granitemoeshared",
        {**LOCAL, **GRANITE, **WIDE, "shared_intermediate_size": 32, "head_dim": 8},
    ),
    "deepseek2-q8_0": (
        "deepseek_v3",
        {
            **ROUTED,
            **LATENT,
            **WIDE,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4-q8_0": (
        "llama4_text",
        {
            **LOCAL,
            **WIDE,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 32,
            "interleave_moe_layer_step": 1,
            "num_hidden_layers": 1,
            "no_rope_layers": [1],
            "use_qk_norm": True,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **LOCAL,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 12,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "use_qk_norm": True,
        },
    ),
}
_HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3next": (
        "qwen3_next",
        {**DELTA, **MIXTURE, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1, "norm_topk_prob": True},
    ),
    "qwen3next-q8_0": (
        "qwen3_next",
        {
            **DELTA,
            **MIXTURE,
            **WIDE,
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mtp_num_hidden_layers": 1,
            "linear_value_head_dim": 16,
        },
    ),
    "qwen35-q8_0": ("qwen3_5_text", {**DELTA, "hidden_size": 32, "intermediate_size": 32, "linear_value_head_dim": 16}),
    "qwen35": ("qwen3_5_text", DELTA),
    "qwen35moe": ("qwen3_5_moe_text", {**DELTA, **MIXTURE, "shared_expert_intermediate_size": 8}),
    "granitehybrid": (
        "granitemoehybrid",
        {
            **LOCAL,
            **GRANITE,
            **MAMBA,
            "shared_intermediate_size": 12,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope",
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "moe"],
            **ROUTED,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "moe_shared_expert_intermediate_size": 12,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "nemotron_h-dense": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 8,
            "expand": 2,
            "conv_kernel": 4,
            "layer_norm_epsilon": 2e-5,
            "rms_norm_eps": None,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "intermediate_size": 16,
            "rope_theta": 1000000.0,
            **MULTIPLIERS,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "head_dim": 4,
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
    ),
    "lfm2moe": (
        "lfm2_moe",
        {
            **MIXTURE,
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "head_dim": 4,
            "norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "use_expert_bias": True,
            "norm_topk_prob": True,
        },
    ),
}
MIXTURES = {name: (kind, {**SHORT, **fields}) for name, (kind, fields) in _MIXTURES.items()}
HYBRIDS = {name: (kind, {**SHORT, **fields}) for name, (kind, fields) in _HYBRIDS.items()}
# Whose layer for a further token drafts in tests, with tokens for nearly all bytes
_FLASH = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1, "num_hidden_layers": 2}
_INDEX = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 6}  # fewer keys than the tests' texts have
FURTHER = {
    **{f"{name}-mtp": {**_MIXTURES, **_HYBRIDS}[name] for name in ("glm4moe", "qwen3next", "qwen35", "qwen35moe")},
    "deepseek2-mtp": ("glm4_moe_lite", {**ROUTED, **LATENT, **_FLASH}),
    "deepseek32-mtp": ("deepseek_v32", {**ROUTED, **LATENT, **_FLASH, **_INDEX}),
    "glm-dsa-mtp": ("glm_moe_dsa", {**ROUTED, **LATENT, **_FLASH, **_INDEX, "indexer_types": ["full", "shared"]}),
}


def further_layers(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a random layer for a further token, where the config promises one: of the last layer's shapes."""
    count = config.get("num_hidden_layers", 0)
    last = f"model.layers.{count - 1}."
    if config.get("mtp_num_hidden_layers"):
        inside, outside = "mtp.layers.0.", "mtp."
        own = {"fc": 2, "pre_fc_norm_embedding": 1, "pre_fc_norm_hidden": 1, "norm": 1}
    elif config.get("num_nextn_predict_layers"):
        inside = outside = f"model.layers.{count}."
        own = {"eh_proj": 2, "enorm": 1, "hnorm": 1, "shared_head.norm": 1}
    else:
        return {}
    hidden = config["hidden_size"]
    shapes = {name.replace(last, inside): weight.shape for name, weight in weights.items() if name.startswith(last)}
    shapes |= {f"{outside}{name}.weight": torch.Size([hidden, 2 * hidden][:dims]) for name, dims in own.items()}
    return {name: _random(shape) for name, shape in shapes.items()}


def _random(shape: torch.Size) -> Tensor:
    """Return weights as a layer may have them: norms, biases and corrections near 1, matrices near 0."""
    numbers = (torch.randn(shape) * 100).round() / 1024  # to which a one is added without rounding
    return numbers + 1 if len(shape) == 1 else numbers


def pack_experts(folder: Path) -> dict[str, Tensor]:
    """Write a gpt-oss' experts anew, in random blocks of MXFP4, and return the weights that these mean."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path = folder / "model.safetensors"
    weights, meaning = load_file(path), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = weights.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 122, (num_experts, rows, columns // 32), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meaning[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32) + 0.0  # GGML has no -0
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return meaning
