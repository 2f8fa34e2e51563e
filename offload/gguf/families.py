"""The table of architectures: llama.cpp's names and settings, and what its converter did to the weights.

Source: `conversion/` and `src/models/` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}

SETTINGS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
}  # fmt: skip
HEAD_DIM = {"attention.key_length": "head_dim"}
WINDOW = {"attention.sliding_window": "sliding_window"}
SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
MIXTURE = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture."""

    model_type: str  # transformers' name
    names: Mapping[str, str] = field(default_factory=dict)  # beside or above those of `IN_LAYER`
    settings: Mapping[str, str] = field(default_factory=dict)  # beside those of `SETTINGS`: key -> field of config.json
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that a file does not state
    rotates_neighbours: bool = False  # the rows of a head's two halves are stored in turn
    norms_plus_one: bool = False  # norms are stored with one added
    rotates_in_part: bool = False  # `rope.dimension_count` may be less than a head
    scalings: tuple[str, ...] = ()  # of rotations, which are read
    query_scale_layers: int = 0  # the number of layers of the one size that scales queries by hidden size over heads


FAMILIES = {
    "llama": Family(model_type="llama", settings=HEAD_DIM, rotates_neighbours=True, scalings=("linear", "llama3")),
    "qwen2": Family(model_type="qwen2", scalings=("linear",)),
    "qwen3": Family(model_type="qwen3", names=HEAD_NORMS, settings=HEAD_DIM, scalings=("linear",)),
    "qwen3moe": Family(
        model_type="qwen3_moe",
        names={**HEAD_NORMS, **EXPERTS, "ffn_gate_inp": "mlp.gate"},
        settings={**HEAD_DIM, **MIXTURE},
        fixed={"norm_topk_prob": True},
        scalings=("linear",),
    ),
    "gemma2": Family(
        model_type="gemma2",
        names=GEMMA,
        settings={**HEAD_DIM, **WINDOW, **SOFT_CAPS},
        norms_plus_one=True,
        query_scale_layers=46,
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        names={**HEAD_NORMS, **GEMMA},
        settings={**HEAD_DIM, **WINDOW, **SOFT_CAPS, "rope.freq_base_swa": "rope_local_base_freq"},
        norms_plus_one=True,
        scalings=("linear",),
        query_scale_layers=62,
    ),
    "phi3": Family(
        model_type="phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings=WINDOW,
        rotates_in_part=True,
        scalings=("longrope",),
    ),
}
