"""What the tiny dense models are made of, for `scripts.make.gguf_tiny`: their vocabulary has 64 tokens."""

from typing import Any

SMALL: dict[str, Any] = {
    "intermediate_size": 16, "tie_word_embeddings": True, "bos_token_id": 62, "eos_token_id": 63, "pad_token_id": 63,
}  # fmt: skip
NO_HEAD_DIM = {"head_dim": 4}  # of families whose heads share the hidden size
FOUR_LAYERS = {"num_hidden_layers": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 1000000.0,
}  # fmt: skip
GROWING = {
    **YARN, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
COHERE = {**NO_HEAD_DIM, "logit_scale": 0.25, "layer_norm_eps": 1e-5, "rms_norm_eps": None}
GEMMA = {**NO_HEAD_DIM, "intermediate_size": 8, "query_pre_attn_scalar": 4, "sliding_window": 8}
ROTATIONS_OF_GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
PER_LAYER = {
    **FOUR_LAYERS, "intermediate_size": 8, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 4,
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 4,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
ROTATIONS_OF_GEMMA_4 = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
ROTATIONS_OF_GEMMA_3N = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
ROTATIONS_OF_OLMO = {
    "full_attention": {**YARN, "attention_factor": 1.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
HUNYUAN = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 10000.0}

# name -> model type, fields beside those
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    name: (model_type, {**SMALL, **fields})
    for name, (model_type, fields) in {
        "llama-yarn": ("llama", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}),
        "mistral3": ("ministral3", {"rope_parameters": GROWING}),
        "smollm3": ("smollm3", {**NO_HEAD_DIM, **FOUR_LAYERS}),
        "granite": ("granite", {
            **NO_HEAD_DIM, "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
        }),
        "qwen2-yarn": ("qwen2", {**NO_HEAD_DIM, "rope_parameters": YARN}),
        "qwen3-yarn": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
        "seed_oss": ("seed_oss", {"attention_out_bias": True}),
        "gemma": ("gemma", {}),
        "gemma3-linear": ("gemma3_text", {**GEMMA, "num_hidden_layers": 6, "rope_parameters": ROTATIONS_OF_GEMMA}),
        "gemma3n": ("gemma3n_text", {
            **PER_LAYER, "rope_parameters": ROTATIONS_OF_GEMMA_3N, "laurel_rank": 4, "altup_num_inputs": 4,
            "altup_active_idx": 1, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        }),
        "gemma4": ("gemma4_text", {
            **PER_LAYER, "rope_parameters": ROTATIONS_OF_GEMMA_4, "global_head_dim": 8, "use_double_wide_mlp": True,
        }),
        "gemma4-same": ("gemma4_text", {
            **PER_LAYER, "rope_parameters": ROTATIONS_OF_GEMMA_4, "global_head_dim": 8, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3,
        }),
        "gemma4moe": ("gemma4_text", {
            **PER_LAYER, "rope_parameters": ROTATIONS_OF_GEMMA_4, "global_head_dim": 8, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 8,
        }),
        "glm4": ("glm4", {"rope_parameters": {
            "rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        }}),
        "olmo2": ("olmo2", NO_HEAD_DIM),
        "olmo3": ("olmo3", {**NO_HEAD_DIM, **FOUR_LAYERS, "sliding_window": 8, "rope_parameters": ROTATIONS_OF_OLMO}),
        "exaone4": ("exaone4", {
            "max_position_embeddings": 131072, "sliding_window": None, "layer_types": ["full_attention"] * 2,
            "rope_parameters": LLAMA3,
        }),
        "exaone4-windows": ("exaone4", {**NO_HEAD_DIM, **FOUR_LAYERS, "sliding_window": 8}),
        "command-r": ("cohere", {**COHERE, "use_qk_norm": True}),
        "cohere2": ("cohere2", {**COHERE, **FOUR_LAYERS, "sliding_window": 8, "rotary_pct": 1.0}),
        "ernie4_5": ("ernie4_5", {}),
        "hunyuan-dense": ("hunyuan_v1_dense", {"max_position_embeddings": 32768, "rope_parameters": HUNYUAN}),
    }.items()
}  # fmt: skip
