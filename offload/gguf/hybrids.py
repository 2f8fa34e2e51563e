"""The lines of the table for models with recurrent layers."""

from offload.gguf.delta_net import joined_in_heads, sections, sizes_of_delta_net, values_in_groups
from offload.gguf.family import HEAD_DIM, HEAD_NORMS, IN_LAYER, MIXTURE, Family
from offload.gguf.mamba import (
    attention_where,
    epsilon_as,
    mamba_in,
    sizes_of_falcon,
    sizes_of_granite,
    sizes_of_mamba,
    sizes_of_nemotron,
    width_of_convolution,
    without_attention,
)
from offload.gguf.mixture_rules import SIGMOID, further_layers, normalised, same_size, scores
from offload.gguf.mixtures import GRANITE_EXPERTS, GRANITE_SETTINGS, NO_BIASES, OWN_SIZE, USED, W, shared
from offload.gguf.parts import convolution, experts_in, fused, logarithm, module, named, one_of, shaped
from offload.gguf.rules import granite_scales

DELTA_NET = {**HEAD_NORMS, "post_attention_norm": "post_attention_layernorm"}
LACKS = frozenset({"ffn_norm"})
WITHOUT_DENSE = LACKS | {"ffn_gate", "ffn_up", "ffn_down"}
SHARED_SIZE = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
MIXED = {**shared("mlp.shared_expert"), "ffn_gate_inp": "mlp.gate"}
SHARED_GATE = {"ffn_gate_inp_shexp.weight": shaped("mlp.shared_expert_gate.weight", lambda shape: (1, shape[-1]))}
SHORT = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
}  # fmt: skip
SHORT_PARTS = {
    "token_embd_norm.weight": named("model.embedding_norm.weight"),
    "shortconv.conv.weight": convolution("conv.conv.weight"),
    "shortconv.in_proj.weight": module("conv.in_proj"),
    "shortconv.out_proj.weight": module("conv.out_proj"),
}  # fmt: skip
NEMOTRON = {
    **{f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"}, "attn_output": "mixer.o_proj", "attn_norm": "norm",
    "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
}  # fmt: skip
NEMOTRON_PARTS = {
    **mamba_in("mixer"),
    "token_embd.weight": module("model.embeddings"),
    "output_norm.weight": named("model.norm_f.weight"),
}  # fmt: skip
GROUPED = {**values_in_groups("linear_attn."), "ssm_norm.weight": named("linear_attn.norm.weight")}

HYBRIDS = {
    "qwen3next": Family(
        model_type="qwen3_next",
        names={
            **DELTA_NET, **MIXED, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_out": "linear_attn.out_proj",
        },
        parts={
            **joined_in_heads("linear_attn.in_proj_qkvz"), **experts_in("mlp.experts"), **SHARED_GATE,
            "ssm_a": logarithm("linear_attn.A_log"),
            "ssm_dt.bias": named("linear_attn.dt_bias"),
            "ssm_conv1d.weight": convolution("linear_attn.conv1d.weight"),
            "ssm_norm.weight": named("linear_attn.norm.weight"),
        },
        lacks=WITHOUT_DENSE,
        biases=NO_BIASES,
        settings={**HEAD_DIM, **MIXTURE, **SHARED_SIZE},
        fixed={"norm_topk_prob": True, "partial_rotary_factor": 1.0},
        needs=frozenset({**MIXTURE, **SHARED_SIZE}),
        norms_plus_one=True,
        rotates_in_part=True,
        scalings=("linear", "yarn"),
        first=(further_layers, sizes_of_delta_net),
    ),
    "qwen35": Family(
        model_type="qwen3_5_text",
        names=DELTA_NET,
        parts=GROUPED,
        lacks=LACKS,
        biases=NO_BIASES,
        settings=HEAD_DIM,
        fixed={"partial_rotary_factor": 1.0},
        norms_plus_one=True,
        rotates_in_part=True,
        scalings=("linear", "yarn"),
        first=(further_layers, sizes_of_delta_net, sections),
    ),
    "qwen35moe": Family(
        model_type="qwen3_5_moe_text",
        names={**DELTA_NET, **MIXED},
        parts={
            **GROUPED, **SHARED_GATE,
            "ffn_gate_exps.weight": fused("mlp.experts.gate_up_proj", 0, 2),
            "ffn_up_exps.weight": fused("mlp.experts.gate_up_proj", 1, 2),
            "ffn_down_exps.weight": fused("mlp.experts.down_proj"),
        },
        lacks=WITHOUT_DENSE,
        biases=NO_BIASES,
        settings={**HEAD_DIM, **MIXTURE, **SHARED_SIZE},
        fixed={"partial_rotary_factor": 1.0},
        needs=frozenset({**MIXTURE, **SHARED_SIZE}),
        norms_plus_one=True,
        rotates_in_part=True,
        scalings=("linear", "yarn"),
        first=(further_layers, sizes_of_delta_net, sections),
    ),
    "lfm2": Family(
        model_type="lfm2",
        names=SHORT,
        parts=SHORT_PARTS,
        biases=NO_BIASES,
        settings=HEAD_DIM,
        scalings=("linear",),
        first=(attention_where("conv"), width_of_convolution),
        rules=(epsilon_as("norm_eps"),),
    ),
    "lfm2moe": Family(
        model_type="lfm2_moe",
        names={**SHORT, "ffn_gate_inp": "feed_forward.gate"},
        parts={
            **SHORT_PARTS, **experts_in("feed_forward.experts", W),
            "exp_probs_b.bias": named("feed_forward.expert_bias"),
        },
        biases=NO_BIASES,
        settings={**HEAD_DIM, **MIXTURE, "leading_dense_block_count": "num_dense_layers"},
        fixed={"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        needs=frozenset({*MIXTURE, "leading_dense_block_count"}),
        scalings=("linear",),
        first=(attention_where("conv"), width_of_convolution, scores(SIGMOID)),
        rules=(epsilon_as("norm_eps"),),
    ),
    "granitehybrid": Family(
        model_type="granitemoehybrid",
        names={"ffn_gate_inp": "block_sparse_moe.router.layer"},
        parts={
            **mamba_in("mamba"), **GRANITE_EXPERTS,
            "ffn_gate.weight": one_of("shared_mlp.input_linear", 0, 2),
            "ffn_up.weight": one_of("shared_mlp.input_linear", 1, 2),
            "ffn_down.weight": one_of("shared_mlp.output_linear", 0),
        },
        settings=GRANITE_SETTINGS,
        fixed={"num_local_experts": 0},
        needs=frozenset({"expert_shared_feed_forward_length"}),
        rotates_neighbours=True,
        scalings=("linear", "yarn"),
        first=(same_size, attention_where("mamba", attention="attention"), sizes_of_granite),
        rules=(granite_scales,),
    ),
    "mamba2": Family(
        model_type="mamba2",
        layers="backbone.layers",
        names={"attn_norm": "norm"},
        parts={
            **mamba_in("mixer"),
            "token_embd.weight": module("backbone.embeddings"),
            "output_norm.weight": named("backbone.norm_f.weight"),
        },
        lacks=frozenset(IN_LAYER) - {"attn_norm"},
        first=(sizes_of_mamba,),
        rules=(without_attention,),
    ),
    "falcon-h1": Family(
        model_type="falcon_h1",
        names={f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        parts={
            **mamba_in("mamba"),
            "ffn_norm": named("pre_ff_layernorm.weight"),
            "output_norm.weight": named("model.final_layernorm.weight"),
        },
        lacks=LACKS,
        biases=NO_BIASES,
        settings=HEAD_DIM,
        first=(sizes_of_falcon,),
    ),
    "nemotron_h": Family(
        model_type="nemotron_h",
        names=NEMOTRON,
        parts=NEMOTRON_PARTS,
        lacks=frozenset({"ffn_norm", "ffn_gate"}),
        biases=NO_BIASES,
        settings=HEAD_DIM,
        rotates_neighbours=True,  # in no layer, but stored as if
        first=(further_layers, sizes_of_nemotron),
        rules=(epsilon_as("layer_norm_epsilon"),),
    ),
    "nemotron_h_moe": Family(
        model_type="nemotron_h",
        names={
            **NEMOTRON, "ffn_gate_inp": "mixer.gate", "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
        },
        parts={
            **NEMOTRON_PARTS, **experts_in("mixer.experts"),
            "exp_probs_b.bias": named("mixer.gate.e_score_correction_bias"),
        },
        lacks=frozenset({"ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}),
        biases=NO_BIASES,
        settings={
            **HEAD_DIM, **USED, **OWN_SIZE, "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        },
        needs=frozenset({*USED, *OWN_SIZE, "expert_count", "expert_shared_count", "expert_shared_feed_forward_length"}),
        rotates_neighbours=True,
        first=(further_layers, sizes_of_nemotron, normalised, scores(SIGMOID)),
        rules=(epsilon_as("layer_norm_epsilon"),),
    ),
}  # fmt: skip
