"""Settings of single architectures that are no field of config.json as they are.

A rule takes what it understands from the settings that are left. What nobody takes refuses the file.
"""

from typing import Any

from offload.gguf.family import SOFT_CAPS, Rule
from offload.gguf.header import GgufHeader

PATTERN = "attention.sliding_window_pattern"
SEES_ALL, SEES_WINDOW = "full_attention", "sliding_attention"


def windows(*, every: int) -> Rule:
    """Return the rule that says which layers see a window: each is stated, or every nth layer sees all."""

    def rule(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
        count, pattern = fields["num_hidden_layers"], own.get(PATTERN, every)
        if not fields.get("sliding_window"):  # and then a pattern says nothing
            fields |= {"sliding_window": None, "layer_types": [SEES_ALL] * count}
            return
        if type(pattern) is int and pattern > 0:
            have_windows = [(layer + 1) % pattern != 0 for layer in range(count)]
        elif isinstance(pattern, list) and len(pattern) == count and set(pattern) <= {False, True}:
            have_windows = pattern
        else:
            return
        own.pop(PATTERN, None)
        fields["layer_types"] = [SEES_WINDOW if has_window else SEES_ALL for has_window in have_windows]

    return rule


def a_window_beyond_all(_: GgufHeader, __: dict[str, Any], fields: dict[str, Any]) -> None:
    """Give a model without windows a size of them, which transformers' code asks for and no layer has."""
    fields["sliding_window"] = fields["sliding_window"] or fields["max_position_embeddings"]


def granite_scales(_: GgufHeader, __: dict[str, Any], fields: dict[str, Any]) -> None:
    """Give the scales that a file may leave out, or state as 0, the values that llama.cpp has for them."""
    head_dim = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    ones = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    defaults = {"attention_multiplier": head_dim**-0.5, **dict.fromkeys(ones, 1.0)}
    fields |= {name: fields.get(name) or default for name, default in defaults.items()}


def granite_rotates(_: GgufHeader, own: dict[str, Any], __: dict[str, Any]) -> None:
    """Take that attention rotates, where that is stated; a dense Granite that does not is not read."""
    if own.get("rope.scaling.finetuned") is True:
        del own["rope.scaling.finetuned"]


def soft_caps(_: GgufHeader, __: dict[str, Any], fields: dict[str, Any]) -> None:
    """Leave out caps of 0, which llama.cpp takes for none."""
    fields |= {name: None for name in SOFT_CAPS.values() if fields.get(name) == 0}


def a_window_of_none(_: GgufHeader, __: dict[str, Any], fields: dict[str, Any]) -> None:
    """Leave out a window of 0, in a family whose layers all have it."""
    fields["sliding_window"] = fields.get("sliding_window") or None


def two_rotations(_: GgufHeader, __: dict[str, Any], fields: dict[str, Any]) -> None:
    """Let layers with a window rotate by a base of their own, and never scaled."""
    scaling, base = fields.pop("rope_scaling", {"rope_type": "default"}), fields.pop("rope_theta")
    of_windows = fields.pop("rope_local_base_freq", base)
    fields["rope_parameters"] = {
        SEES_ALL: {**scaling, "rope_theta": base},
        SEES_WINDOW: {"rope_type": "default", "rope_theta": of_windows},
    }


def olmo3(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Tell Olmo 3, which has windows, from Olmo 2."""
    if fields["sliding_window"] is not None:
        fields["model_type"] = "olmo3"
        two_rotations(header, own, fields)


def ministral3(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Tell Ministral 3, whose queries grow with the position, from Mistral Small 3, which is a Llama."""
    growth, scaling = fields.pop("llama_4_scaling_beta", None), fields.get("rope_scaling", {})
    if growth is None:
        return
    if scaling.get("rope_type") != "yarn":  # whose length says when they grow
        own["attention.temperature_scale"] = growth
    fields["model_type"] = "ministral3"
    fields["rope_scaling"] = {**scaling, "llama_4_scaling_beta": growth}


def head_norms(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Find whether heads are normalised: a file has the norms or not."""
    fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors


def bias_of_output(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Find whether the output of attention has a bias, which is apart from those of queries, keys and values."""
    fields["attention_out_bias"] = "blk.0.attn_output.bias" in header.tensors
