"""Configurations of every type that transformers knows, so small that a model of them is made in a moment.

Sizes are set by the names that families use for them, in the configuration and in its parts. What a family wants
beyond that stands in `OWN`.
"""

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCAB = 257  # 256 bytes and an end-of-text token
WINDOW = 8  # shorter than the prompts
LAYERS = 4
TYPES = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}))

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_vocab", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "embedding_size", "word_embed_proj_dim",
                     "hidden_dim", "lru_width", "attention_hidden_size", "mm_hidden_size", "out_hidden_size",
                     "projection_dim", "text_hidden_size", "projector_hidden_size", "adapter_out_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "d_ff",
                     "decoder_ffn_dim", "dim_ff", "d_inner", "intermediate_size_mlp", "mlp_hidden_size",
                     "expert_ffn_hidden_size", "shared_intermediate_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                     "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim",
                     "index_head_dim", "attention_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length",
                     "max_target_positions", "n_ctx"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size",
                     "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size",
                     "mamba_headdim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("mamba_d_ssm", "mamba_expand_size"), 64),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("depth",), 2),
    **dict.fromkeys(("index_n_heads", "index_topk", "hidden_size_per_layer_input", "laurel_rank"), 8),
    "first_k_dense_replace": 1,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 256,
}  # fmt: skip

# What single families want: type -> fields of the text part
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
FULL_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
SHARED = {"num_hidden_layers": 6, "num_kv_shared_layers": 2,
          "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": MROPE} for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text",
                                                     "glm_ocr_text", "paddleocr_vl_text", "glm4v_text")},
    "hunyuan_vl_text": {"rope_parameters": MROPE, "head_dim": 8},
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 0]}},
    "mistral4": {"head_dim": 16},
    "mistral4_text": {"head_dim": 16},
    "blt": {"encoder_hash_byte_group_vocab": 97, "local_attention_window_len": WINDOW, "patching_threshold": 2.6},
    **{name: {"hidden_size_global": 32} for name in ("blt_local_encoder", "blt_local_decoder")},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"num_key_value_heads": 1, "index_n_heads": 32, "index_topk": 3,
                    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": WINDOW},
                    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                                    "compressed_sparse_attention"],
                    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"], "o_groups": 2},
    **{name: {"head_dim": 8} for name in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")},
    "cohere_compass_text": {"rope_parameters": FULL_ROPE},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4, "swa_num_attention_heads": 4,
                        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 24,
                        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], "moe_num_experts": 4, "mlp_layer_types": DENSE_FIRST},
    "gemma3n_text": {
        **SHARED, "intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "global_head_dim": 16, "num_global_key_value_heads": 1},
    "dots3_note_vision_encoder": {"per_layer_config": {}, "mlp_layer_types": ["dense"] * LAYERS, "adapter_in_dim": 32},
    "glm5_next_text": {"num_key_value_heads": 4, "index_n_heads": 32, "index_kpool": 4, "qk_rope_head_dim": 0,
                       "linear_head_dim": 8, "linear_num_heads": 4,
                       "head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {"spatial_target_layers": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {"linear_head_dim": 8, "linear_num_heads": 4, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "llama4_text": {"floor_scale": 4, "no_rope_layers": [1, 0, 1, 0]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 3], "index_block_size": 4,
                           "index_topk_blocks": 2, "index_n_heads": 2, "mlp_layer_types": DENSE_FIRST},
    "qwen4_exp_text": {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 4, "ple_layer_ids": [1], "ngram_vocab_size_base": 100,
                       "ple_embed_dim": 32, "split_ngram_parts": 4, "eos_token_id": 256},
    "step3p5": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW,
                "num_sliding_attention_heads": 8, "share_expert_dim": 16,
                "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0}
                                    for kind in ("sliding_attention", "full_attention")}},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_hidden_size": 64,
              "attention_head_dim": 16},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3],
               "attention_hidden_size": 64, "attention_head_dim": 16},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": LAYERS},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
}  # fmt: skip


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return a small configuration of a type; raises whatever the family raises for one that it cannot use."""
    return _tiny(CONFIG_MAPPING[model_type])


def _tiny(kind: type[PretrainedConfig]) -> PretrainedConfig:
    default = kind()
    parts = {}
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            parts[name] = _tiny(type(part)).to_dict()
    own = OWN.get(kind.model_type, {})
    sizes = {name: value for name, value in SIZES.items() if _stated(default, name) is not None}
    kinds = _stated(default, "layer_types")
    if isinstance(kinds, list) and kinds:
        sizes["layer_types"] = _each_kind(kinds)
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]  # as families with latents have it
    return kind(**{**sizes, **own, **parts})


def _stated(config: PretrainedConfig, name: str) -> Any:
    """Return a field's value; None where the family has none of that name, or numbers by layer."""
    found = vars(config).get(name)
    if name in SIZES and not isinstance(found, int | list if name == "eos_token_id" else int):
        return None
    return None if isinstance(found, bool) else found


def _each_kind(kinds: list[str]) -> list[str]:
    """Return a list of so many kinds in which each comes, the last one of the default last."""
    own = list(dict.fromkeys(reversed(kinds)))
    return [own[index % len(own)] for index in range(LAYERS)][::-1]


def is_image_text(model_type: str) -> bool:
    """Return whether transformers has a model of images and text of this type."""
    return model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
