"""What the settings that families read may be, by key. Other values are refused by name before a rule reads them.

Types are llama.cpp's own, which loads no file with others. Bounds keep out what no model has, and what code that is
written for models does not expect.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from offload.gguf.family import KEY_HEADS, WINDOW, Family
from offload.gguf.header import GgufHeader
from offload.gguf.numbers import wrong_value
from offload.gguf.rules import PATTERN

# Fractions: none below or at the first number, none above the second; 0 as well where it stands for none.
MOST = float(1 << 24)
ZERO_IS_NONE = {
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.scale",
    "attention.temperature_scale", "attn_logit_softcapping", "embedding_scale", "expert_weights_scale",
    "final_logit_softcapping", "logit_scale", "residual_scale", "rope.scale_linear", "rope.scaling.factor",
    "rope.scaling.yarn_log_multiplier",
}  # fmt: skip
FRACTIONS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(ZERO_IS_NONE, (0.0, MOST)),
    "rope.freq_base": (1.0, math.inf), "rope.freq_base_swa": (1.0, math.inf),
    "rope.scaling.attn_factor": (0.0, MOST), "rope.scaling.yarn_attn_factor": (0.0, MOST),
    "rope.scaling.yarn_beta_fast": (0.0, MOST), "rope.scaling.yarn_beta_slow": (0.0, MOST),
    "rope.scaling.yarn_ext_factor": (-2.0, 1.0),
}  # fmt: skip
# Whole numbers: none below 0, none above these.
LENGTHS, WIDTHS, EXPERTS, HEADS, LAYERS = 1 << 27, 1 << 24, 1 << 18, 1 << 12, 2000
WHOLE = {
    **dict.fromkeys(("context_length", "rope.scaling.original_context_length", "attention.sliding_window"), LENGTHS),
    **dict.fromkeys((
        "embedding_length", "feed_forward_length", "vocab_size", "attention.key_length", "attention.value_length",
        "attention.key_length_swa", "attention.value_length_swa", "attention.key_length_mla",
        "attention.value_length_mla", "attention.kv_lora_rank", "attention.q_lora_rank", "rope.dimension_count",
        "rope.dimension_count_swa", "rope.dimension_sections", "expert_feed_forward_length",
        "expert_shared_feed_forward_length", "embedding_length_per_layer_input", "shortconv.l_cache",
        "ssm.conv_kernel", "ssm.state_size", "ssm.inner_size", "attention.indexer.key_length",
        "attention.indexer.top_k",
    ), WIDTHS),
    **dict.fromkeys((
        "expert_count", "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count",
        "expert_gating_func", "altup.num_inputs", "altup.active_idx",
    ), EXPERTS),
    **dict.fromkeys((
        "attention.head_count", KEY_HEADS, "ssm.group_count", "ssm.time_step_rank", "attention.indexer.head_count",
    ), HEADS),
    **dict.fromkeys((
        "block_count", "nextn_predict_layers", "leading_dense_block_count", "interleave_moe_layer_step",
        "full_attention_interval", "attention.shared_kv_layers",
    ), LAYERS),
}  # fmt: skip
BOOLEANS = {"expert_weights_norm", "rope.scaling.finetuned"}
OF_LAYERS = {PATTERN, "attention.recurrent_layers", "attention.indexer.types"}  # yes or no, or their interval
TEXTS = {"rope.scaling.type": ("none", "linear", "yarn", "longrope")}
CUTS = "activation_sparsity_scale"  # of layers' inner numbers, of which there may be none
LISTS = {
    *OF_LAYERS, CUTS, "attention.head_count", KEY_HEADS, "feed_forward_length",
    "expert_feed_forward_length", "expert_used_count", "rope.dimension_sections",
}  # fmt: skip
# Whole numbers of which a family that reads them has one at least
NOT_NONE = {"interleave_moe_layer_step", "altup.num_inputs", "shortconv.l_cache"}


def check_values(header: GgufHeader, family: Family, own: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a value of another type, or one that no model has, of what families read."""
    not_none = NOT_NONE & family.settings.keys() | {*WINDOW, "expert_count"} & family.needs
    if family.fixed.get("sliding_window"):
        not_none |= WINDOW.keys()
    for key, value in own.items():
        words, is_right = _needed(key)
        numbers = value if isinstance(value, list) and key in LISTS and value else [value]
        if not all(map(is_right, numbers)):
            raise wrong_value(header, key, value, words)
        if key in not_none and 0 in numbers:
            raise wrong_value(header, key, value, "a whole number from 1 on")


def _needed(key: str) -> tuple[str, Callable[[Any], bool]]:
    """Return what a setting has to be, in words, and what tells it; anything for one that no family reads."""
    if key in WHOLE:
        return f"a whole number up to {WHOLE[key]}", lambda one: type(one) is int and 0 <= one <= WHOLE[key]
    if key in FRACTIONS:
        above, most = FRACTIONS[key]
        words = f"a fraction above {above:g}" if most == math.inf else f"a fraction above {above:g}, up to {most:g}"
        return words, lambda one: _is_fraction(one, above, most) or (key in ZERO_IS_NONE and _is_zero(one))
    if key in BOOLEANS:
        return "true or false", lambda one: isinstance(one, bool)
    if key in OF_LAYERS:
        return "true or false for each layer", lambda one: type(one) in {bool, int} and 0 <= one <= LAYERS
    if key in TEXTS:
        return f"one of {', '.join(TEXTS[key])}", TEXTS[key].__contains__
    if key == CUTS:
        return "a fraction for each layer", lambda one: isinstance(one, float) and one < math.inf
    return "", lambda _: True


def _is_fraction(found: Any, above: float, most: float) -> bool:
    return isinstance(found, float) and above < found <= most and math.isfinite(found)


def _is_zero(found: Any) -> bool:
    return isinstance(found, float) and found == 0
