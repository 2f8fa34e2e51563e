"""Settings whose value says nothing: llama.cpp's own writer states every setting that it knows.

A setting that a family reads is read whatever its value; the values here are those of all others. Any other value of
them would make other texts, and refuses the file.
"""

import math
from collections.abc import Mapping
from typing import Any

from offload.gguf.header import TextList
from offload.gguf.rules import PATTERN

# Where 0 or False stands for what a model has not.
ZEROS = frozenset({
    "activation.situ_linear_beta", "attention.clamp_kqv", "attention.compress_ratios",
    "attention.compress_rope_freq_base", "attention.decay_lora_rank", "attention.gate_lora_rank",
    "attention.group_norm_epsilon", "attention.group_norm_groups", "attention.iclr_lora_rank",
    "attention.indexer.block_size", "attention.indexer.head_count", "attention.indexer.key_length",
    "attention.indexer.kpool", "attention.indexer.local_blocks", "attention.indexer.top_k", "attention.indexer.types",
    "attention.key_length_mla", "attention.key_length_mla_swa", "attention.kv_lora_rank", "attention.kv_lora_rank_swa",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.max_alibi_bias",
    "attention.output_group_count", "attention.output_lora_rank", "attention.output_scale", "attention.q_lora_rank",
    "attention.recurrent_layers", "attention.relative_buckets_count", "attention.scale", "attention.sliding_window",
    "attention.temperature_length", "attention.temperature_scale", "attention.value_expert_count",
    "attention.value_expert_used_count", "attention.value_length_mla", "attention.value_length_mla_swa",
    "attention.value_residual_mix_lora_rank", "attention.value_scale", "attn_logit_softcapping", "attn_res.block_size",
    "convnext.block_count", "convnext.embedding_length", "decoder_block_count", "dense_2_feat_in", "dense_2_feat_out",
    "dense_3_feat_in", "dense_3_feat_out", "embedding_scale", "expert_chunk_feed_forward_length", "expert_count",
    "expert_feed_forward_length", "expert_gating_func", "expert_group_count", "expert_group_used_count",
    "expert_latent_length", "expert_shared_count", "expert_shared_feed_forward_length", "expert_used_count",
    "expert_weights_norm", "expert_weights_scale", "experts_per_group", "final_logit_softcapping", "hash_layer_count",
    "hrm.h_cycles", "hrm.l_cycles", "hrm.layers_per_stack", "hrm.prefix_lm", "hyper_connection.count",
    "hyper_connection.epsilon", "hyper_connection.low_rank", "hyper_connection.magnitude",
    "hyper_connection.sinkhorn_iterations", "interleave_moe_layer_step", "kda.head_dim", "kda.safe_gate",
    "leading_dense_block_count", "logit_scale", "moe_every_n_layers", "n_deepstack_layers", "nextn_predict_layers",
    "pooling_type", "posnet.block_count", "posnet.embedding_length", "rescale_every_n_layers", "residual_scale",
    "rope.dimension_sections", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier",
    "router_logit_softcapping", "shortconv.l_cache", "ssm.conv_kernel", "ssm.dt_b_c_rms", "ssm.group_count",
    "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "swiglu_clamp_exp", "swiglu_clamp_shexp", "swin_norm",
    "time_decay_extra_dim", "time_mix_extra_dim", "use_parallel_residual", "wkv.head_size",
})  # fmt: skip
# Other values that llama.cpp has where a file states none, or that stand for none.
OTHERS: dict[str, tuple[Any, ...]] = {
    "activation.situ_beta": (1.0,), "attention.causal": (True,), "attention.indexer.kpool_select_tail": (True,),
    "attention.rope_pattern": (1,), "attn_logit_softcapping": (50.0,), "decoder_start_token_id": (-1,),
    "deepstack_mapping": (-1,), "embedding_scale": (1.0,), "expert_group_scale": (0.05,),
    "expert_weights_scale": (1.0,), "final_logit_softcapping": (30.0,), "kda.gate_lower_bound": (-math.inf,),
    "logit_scale": (1.0,), "pooling_type": (0xFFFFFFFF, -1), "residual_scale": (1.0,),
    "rope.scaling.attn_factor": (1.0,), "rope.scaling.finetuned": (True,), "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,), "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 0.0), "router_logit_softcapping": (30.0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"), "token_shift_count": (2,),
}  # fmt: skip
OF_WINDOWS = {
    "rope.freq_base_swa": "rope_theta", "rope.dimension_count_swa": "head_dim", "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim",
}  # fmt: skip
RECURRENT = "attention.recurrent_layers"
RECURRENT_KINDS, ALL_RECURRENT = {"mamba", "conv"}, {"mamba2", "falcon_h1"}  # of layers; models of such layers alone
UNSCALED = {"gemma3n_text", "gemma4_text"}  # products of queries and keys
TOLERANCE = 1e-6  # of float32


# Settings that families read, in which llama.cpp takes 0 for none: what then stands for them, None for nothing.
FOR_ZERO = {
    "attention.scale": None, "embedding_scale": None, "expert_group_count": 1, "expert_group_used_count": 1,
    "expert_weights_scale": 1.0, "logit_scale": None, "residual_scale": None,
}  # fmt: skip


def replace_zeros(own: dict[str, Any], known: Mapping[str, str]) -> None:
    """Change the settings in `own` that are as good as left out, of those that a family reads."""
    for key in FOR_ZERO.keys() & own.keys() & known.keys():
        if type(own[key]) in {int, float} and own[key] == 0:
            if FOR_ZERO[key] is None:
                del own[key]
            else:
                own[key] = FOR_ZERO[key]


def drop_what_says_nothing(own: dict[str, Any], fields: dict[str, Any], means: frozenset[str]) -> None:
    """Take the settings from `own` that say nothing of a model with these fields; those that it `means` stay."""
    for key in [key for key, value in own.items() if key not in means and _says_nothing(key, value, fields)]:
        del own[key]


def _says_nothing(key: str, value: Any, fields: dict[str, Any]) -> bool:
    if isinstance(value, TextList):  # of a classifier's labels, of which there are none
        return key == "classifier.output_labels" and not value.read()
    numbers = value if isinstance(value, list) else [value]
    if key in ZEROS and numbers and all(type(number) in {int, float, bool} and number == 0 for number in numbers):
        return True
    if key in OTHERS and numbers and all(any(_is_same(number, other) for other in OTHERS[key]) for number in numbers):
        return True
    if key in OF_WINDOWS or key == PATTERN:  # of layers with a window, of which there are none, or as of all others
        return not fields.get("sliding_window") or value == fields.get(OF_WINDOWS.get(key, key))
    if key == "leading_dense_block_count":  # of a model without experts
        return bool(value == fields["num_hidden_layers"])
    if key == RECURRENT:
        return _restates_layers(numbers, fields)
    if key == "attention.scale":
        usual = fields.get("query_pre_attn_scalar", 1.0 if fields["model_type"] in UNSCALED else None)
        return usual is not None and _is_same(value, usual**-0.5)
    return key == "attention.rope_pattern" and value == 0 and fields.get("position_embedding_type") == "nope"


def _is_same(found: Any, other: Any) -> bool:
    if isinstance(found, float) and isinstance(other, float):
        return math.isclose(found, other, rel_tol=TOLERANCE)
    return type(found) is type(other) and bool(found == other)


def _restates_layers(numbers: list[Any], fields: dict[str, Any]) -> bool:
    """Return whether the layers that are said to be recurrent are those that have no heads of keys."""
    if fields["model_type"] in ALL_RECURRENT:
        return all(number == 1 for number in numbers)
    kinds = fields.get("layer_types", fields.get("layers_block_type", ()))
    expected = [kind in RECURRENT_KINDS for kind in kinds]
    return any(expected) and bool(numbers) and (numbers * len(expected) if len(numbers) == 1 else numbers) == expected
