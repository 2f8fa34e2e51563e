"""What published models say of themselves in their config.json, as far as it decides sizes."""

from typing import Any

GLM_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip


def llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int = 32000, **more: Any
) -> dict[str, Any]:
    """A Llama's config.json."""
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 8192, "dtype": "float16", "tie_word_embeddings": False, **more,
    }  # fmt: skip


MODELS = {
    "llama2-70b": llama(8192, 28672, 80, 64, 8),
    "llama2-13b": llama(5120, 13824, 40, 40, 40),
    "llama2-7b": llama(4096, 11008, 32, 32, 32),
    "vicuna-33b": llama(6656, 17920, 60, 52, 52),
    "llama3-70b": llama(8192, 28672, 80, 64, 8, 128256),
    "llama3-8b": llama(4096, 14336, 32, 32, 8, 128256),
    "llama3-1b": llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "dtype": "bfloat16", "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    },
}  # fmt: skip
