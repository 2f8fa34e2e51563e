"""The lines of the table for mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from offload.gguf.family import HEAD_DIM, HEAD_NORMS, WINDOW, Family, Rule
from offload.gguf.mixture_rules import (
    SIGMOID,
    SOFTMAX,
    further_layers,
    latent_attention,
    layers_with_index,
    lists_of_hunyuan,
    normalised,
    routing_of_deepseek,
    same_size,
    scaling_of_deepseek,
    scores,
    shared_of_ernie,
    shared_of_granite,
    sizes_of_index,
    sizes_of_llama4,
    whole_correction,
)  # fmt: skip
from offload.gguf.parts import experts_in, fused, in_turn, keys_of_heads, module, named, one_of, shaped, values_of_heads
from offload.gguf.rules import PATTERN, granite_scales, head_norms, windows

NO_BIASES: frozenset[str] = frozenset()
INPUTS = frozenset({"attn_q", "attn_k", "attn_v"})
USED = {"expert_used_count": "num_experts_per_tok"}
LOCAL = {**USED, "expert_count": "num_local_experts"}
OWN_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}
ROUTED = {
    **USED, **OWN_SIZE, "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}  # fmt: skip
W = ("w1", "w3", "w2")  # gate, up, down
INDEX = {
    "indexer.k_norm.weight": named("self_attn.indexer.k_norm.weight"),
    "indexer.k_norm.bias": named("self_attn.indexer.k_norm.bias"),
    "indexer.proj.weight": module("self_attn.indexer.weights_proj"),
    "indexer.attn_k.weight": module("self_attn.indexer.wk"),
    "indexer.attn_q_b.weight": module("self_attn.indexer.wq_b"),
}
INDEX_SIZES = {
    "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}  # fmt: skip

GRANITE_EXPERTS = {
    "ffn_gate_exps.weight": one_of("block_sparse_moe.input_linear", 0, 2),
    "ffn_up_exps.weight": one_of("block_sparse_moe.input_linear", 1, 2),
    "ffn_down_exps.weight": one_of("block_sparse_moe.output_linear", 0),
    "ffn_gate_shexp.weight": one_of("shared_mlp.input_linear", 0, 2),
    "ffn_up_shexp.weight": one_of("shared_mlp.input_linear", 1, 2),
    "ffn_down_shexp.weight": one_of("shared_mlp.output_linear", 0),
}  # fmt: skip
GRANITE_SETTINGS = {
    **HEAD_DIM, **LOCAL, "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}  # fmt: skip


def shared(module: str) -> dict[str, str]:
    """Return the names of the experts that every token passes."""
    return {f"ffn_{name}_shexp": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


def deepseek(
    model_type: str, *, first: tuple[Rule, ...], fixed: Mapping[str, Any] | None = None, has_index: bool = False
) -> Family:
    """Return the line of a family with DeepSeek's attention and experts, perhaps with an index of keys."""
    return Family(
        model_type=model_type,
        names={
            **shared("mlp.shared_experts"),
            "ffn_gate_inp": "mlp.gate",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
        parts={
            **experts_in("mlp.experts"),
            **(INDEX if has_index else {}),
            "exp_probs_b.bias": named("mlp.gate.e_score_correction_bias"),
            "attn_k_b.weight": keys_of_heads("self_attn.kv_b_proj"),
            "attn_v_b.weight": values_of_heads("self_attn.kv_b_proj"),
        },
        lacks=frozenset({"attn_k", "attn_v"}),
        biases=NO_BIASES,
        settings={**ROUTED, **(INDEX_SIZES if has_index else {})},
        fixed=fixed or {},
        needs=frozenset(ROUTED) - {"expert_weights_scale", "expert_group_count", "expert_group_used_count"}
        | (INDEX_SIZES.keys() if has_index else set()),
        scalings=("linear", "yarn"),
        first=(further_layers, latent_attention, *((sizes_of_index,) if has_index else ()), *first, normalised),
        rules=(scaling_of_deepseek,),
    )


MIXTURES = {
    "llama with experts": Family(
        model_type="mixtral",
        names={"ffn_gate_inp": "block_sparse_moe.gate"},
        parts=experts_in("block_sparse_moe.experts", W),
        biases=NO_BIASES,
        settings={**HEAD_DIM, **LOCAL},
        fixed={"sliding_window": None},
        needs=frozenset(USED),
        rotates_neighbours=True,
        scalings=("linear",),
    ),
    "gpt-oss": Family(
        model_type="gpt_oss",
        names={"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
        parts={
            "attn_sinks.weight": named("self_attn.sinks"),
            "ffn_gate_exps.weight": fused("mlp.experts.gate_up_proj", 0, 2, is_transposed=True, is_in_turn=True),
            "ffn_up_exps.weight": fused("mlp.experts.gate_up_proj", 1, 2, is_transposed=True, is_in_turn=True),
            "ffn_down_exps.weight": fused("mlp.experts.down_proj", is_transposed=True),
            "ffn_gate_exps.bias": in_turn("mlp.experts.gate_up_proj_bias", 0),
            "ffn_up_exps.bias": in_turn("mlp.experts.gate_up_proj_bias", 1),
            "ffn_down_exps.bias": named("mlp.experts.down_proj_bias"),
        },
        lacks=frozenset({"ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}),
        settings={**HEAD_DIM, **WINDOW, **LOCAL},
        needs=frozenset({**WINDOW, **LOCAL}),
        scalings=("yarn",),
        first=(same_size,),
        rules=(windows(every=2), whole_correction),
    ),
    "qwen2moe": Family(
        model_type="qwen2_moe",
        names={"ffn_gate_inp": "mlp.gate", **shared("mlp.shared_expert")},
        parts={
            **experts_in("mlp.experts"),
            "ffn_gate_inp_shexp.weight": shaped("mlp.shared_expert_gate.weight", lambda shape: (1, shape[-1])),
        },
        biases=INPUTS,
        settings={
            **HEAD_DIM, **USED, **OWN_SIZE, "expert_count": "num_experts",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        fixed={"norm_topk_prob": False},
        needs=frozenset({*USED, *OWN_SIZE, "expert_count", "expert_shared_feed_forward_length"}),
        scalings=("linear", "yarn"),
    ),
    "glm4moe": Family(
        model_type="glm4_moe",
        names={
            **HEAD_NORMS, **shared("mlp.shared_experts"), "ffn_gate_inp": "mlp.gate",
            "post_attention_norm": "post_attention_layernorm",
        },
        parts={**experts_in("mlp.experts"), "exp_probs_b.bias": named("mlp.gate.e_score_correction_bias")},
        lacks=frozenset({"ffn_norm"}),
        biases=INPUTS,
        settings={**HEAD_DIM, **ROUTED},
        fixed={"partial_rotary_factor": 1.0, "n_group": 1, "topk_group": 1},
        needs=frozenset(ROUTED) - {"expert_group_count", "expert_group_used_count"},
        rotates_in_part=True,
        scalings=("linear", "yarn"),
        first=(further_layers, scores(SIGMOID), normalised),
        rules=(head_norms,),
    ),
    "deepseek2": deepseek("deepseek_v2", first=(routing_of_deepseek,), fixed={"routed_scaling_factor": 1.0}),
    "deepseek32": deepseek("deepseek_v32", first=(routing_of_deepseek,), has_index=True),
    "glm-dsa": deepseek(
        "glm_moe_dsa",
        first=(scores(SIGMOID), layers_with_index),
        fixed={"n_group": 1, "topk_group": 1},
        has_index=True,
    ),
    "minimax-m2": Family(
        model_type="minimax_m2",
        names={**HEAD_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        parts={
            **experts_in("block_sparse_moe.experts", W),
            "exp_probs_b.bias": named("block_sparse_moe.e_score_correction_bias"),
        },
        biases=NO_BIASES,
        settings={**HEAD_DIM, **LOCAL},
        needs=frozenset(LOCAL),
        rotates_in_part=True,
        scalings=("linear", "yarn"),
        first=(same_size, scores(SIGMOID)),
    ),
    "granitemoe": Family(
        model_type="granitemoe",
        names={"ffn_gate_inp": "block_sparse_moe.router.layer"},
        parts=GRANITE_EXPERTS,
        settings=GRANITE_SETTINGS,
        needs=frozenset(LOCAL),
        rotates_neighbours=True,
        scalings=("linear", "yarn"),
        first=(same_size, shared_of_granite),
        rules=(granite_scales,),
    ),
    "ernie4_5-moe": Family(
        model_type="ernie4_5_moe",
        names={**shared("mlp.shared_experts"), "ffn_gate_inp": "mlp.gate"},
        parts={
            **experts_in("mlp.experts"),
            "exp_probs_b.bias": shaped("mlp.moe_statics.e_score_correction_bias", lambda shape: (1, shape[-1])),
        },
        biases=NO_BIASES,
        settings={
            **HEAD_DIM, **OWN_SIZE, "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts", "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        needs=frozenset({
            *OWN_SIZE, "expert_count", "expert_used_count", "expert_shared_count", "interleave_moe_layer_step",
            "leading_dense_block_count",
        }),
        scalings=("linear", "yarn"),
        first=(shared_of_ernie, scores(SOFTMAX)),
    ),
    "hunyuan-moe": Family(
        model_type="hunyuan_v1_moe",
        names={
            **shared("mlp.shared_mlp"), "ffn_gate_inp": "mlp.gate.wg",
            "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
        },
        parts=experts_in("mlp.experts"),
        biases=NO_BIASES,
        settings={**HEAD_DIM, "expert_count": "num_experts", "expert_used_count": "moe_topk"},
        needs=frozenset({"expert_count", "expert_used_count"}),
        scalings=("linear", "alpha"),
        first=(lists_of_hunyuan,),
    ),
    "llama4": Family(
        model_type="llama4_text",
        names={
            **shared("feed_forward.shared_expert"), "ffn_gate_inp": "feed_forward.router",
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        parts={
            "ffn_gate_exps.weight": fused("feed_forward.experts.gate_up_proj", 0, 2, is_transposed=True),
            "ffn_up_exps.weight": fused("feed_forward.experts.gate_up_proj", 1, 2, is_transposed=True),
            "ffn_down_exps.weight": fused("feed_forward.experts.down_proj", is_transposed=True),
        },
        biases=NO_BIASES,
        settings={**HEAD_DIM, **LOCAL, "interleave_moe_layer_step": "interleave_moe_layer_step"},
        # which llama.cpp has as constants
        fixed={"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
        needs=frozenset({"interleave_moe_layer_step", *LOCAL}),
        means=frozenset({"attention.sliding_window", PATTERN}),  # of which 0 is a model of chunks that are not
        first=(sizes_of_llama4, scores(SIGMOID)),
    ),
}  # fmt: skip
