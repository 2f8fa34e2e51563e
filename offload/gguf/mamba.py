"""Layers of Mamba 2 and of short convolutions, beside layers with attention: sizes, kinds of layers, parts."""

from __future__ import annotations

from typing import Any

from offload.gguf.family import Part, Rule
from offload.gguf.header import GgufHeader
from offload.gguf.parts import convolution, logarithm, module, named, vector

CONVOLUTION_BIAS = "ssm_conv1d.bias"  # of the channels
SIZES = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
KEY_HEADS, FORWARD = "attention.head_count_kv", "feed_forward_length"


def mamba_in(name: str) -> dict[str, Part]:
    """Return the parts of a layer of Mamba 2."""
    return {
        "ssm_in.weight": module(f"{name}.in_proj"),
        "ssm_out.weight": module(f"{name}.out_proj"),
        "ssm_conv1d.weight": convolution(f"{name}.conv1d.weight"),
        "ssm_conv1d.bias": named(f"{name}.conv1d.bias"),
        "ssm_dt.bias": named(f"{name}.dt_bias"),
        "ssm_a": logarithm(f"{name}.A_log"),
        "ssm_d": vector(f"{name}.D"),
        "ssm_norm.weight": vector(f"{name}.norm.weight"),
    }


def sizes(own: dict[str, Any], *, groups_divide_heads: bool = False) -> tuple[int, ...] | None:
    """Take the sizes of a recurrent layer: width, state, groups, heads, and all heads together; None if they are none.

    Their number is left where heads are no parts of their whole, or with `groups_divide_heads` that of uneven groups.
    """
    found = tuple(size for name in SIZES if type(size := own.get(f"ssm.{name}")) is int and size > 0)
    if len(found) < len(SIZES):
        return None
    are_no_groups = groups_divide_heads and found[3] % found[2] != 0
    wrong = "time_step_rank" if found[4] % found[3] else "group_count" if are_no_groups else None
    for name in {*SIZES} - {wrong}:
        del own[f"ssm.{name}"]
    return found if wrong is None else None


def numbers_of_layers(own: dict[str, Any], key: str) -> list[int] | None:
    """Take a number of each layer, which is one for all that are not 0; None where it is something else."""
    found, count = own.get(key), own.get("block_count")
    if not isinstance(found, list) or type(count) is not int or not 0 < count <= len(found):
        return None
    if any(type(number) is not int for number in found) or len({*found[:count]} - {0}) > 1:
        return None
    del own[key]
    return found[:count]


def attention_where(other: str, *, attention: str = "full_attention") -> Rule:
    """Return the rule that finds layers with attention: those that have heads of keys."""

    def rule(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
        heads = numbers_of_layers(own, KEY_HEADS)
        if heads is None:
            return
        fields["num_key_value_heads"] = max(heads)
        fields["layer_types"] = [attention if count else other for count in heads]

    return rule


def width_of_convolution(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the width of a short convolution, and give the size that stands as it is."""
    if type(own.get("shortconv.l_cache")) is int:
        fields |= {"conv_L_cache": own.pop("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}


def epsilon_as(name: str) -> Rule:
    """Return the rule that gives the small number of norms its other name."""

    def rule(_: GgufHeader, __: dict[str, Any], fields: dict[str, Any]) -> None:
        fields[name] = fields["rms_norm_eps"]

    return rule


def sizes_of_granite(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the sizes of Mamba 2, and whether attention rotates."""
    hidden, found = own.get("embedding_length"), sizes(own)
    if found is None or type(hidden) is not int or hidden < 1 or found[4] % hidden:
        return
    fields |= {**_sizes_beside_attention(header, found), "mamba_expand": found[4] // hidden}
    if isinstance(own.get("rope.scaling.finetuned", True), bool):
        fields["position_embedding_type"] = "rope" if own.pop("rope.scaling.finetuned", True) else "nope"


def sizes_of_mamba(__: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the sizes of a model of Mamba 2 alone; its files state no heads and no network, which are dropped again."""
    for key in ("attention.head_count", FORWARD):
        if own[key] != 0:
            own[f"{key} beside Mamba 2"] = own[key]
        own[key] = 1
    for key in (KEY_HEADS, "attention.key_length", "attention.value_length", "rope.dimension_count"):
        if own.get(key) == 0:
            del own[key]
    hidden, found = own["embedding_length"], sizes(own)
    if found is None or type(hidden) is not int or hidden < 1:
        return
    width, state, groups, heads, inner = found
    if inner % hidden:
        own["ssm.inner_size"] = inner
        return
    fields |= {
        "conv_kernel": width, "state_size": state, "n_groups": groups, "num_heads": heads,
        "head_dim": inner // heads, "expand": inner // hidden,
    }  # fmt: skip


def without_attention(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Drop the fields that a model of Mamba 2 alone does not have."""
    fields["layer_norm_epsilon"] = fields.pop("rms_norm_eps")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "attention_bias", "rope_theta"):
        del fields[name]
    fields["use_conv_bias"] = header.has_tensor(CONVOLUTION_BIAS)


def sizes_of_falcon(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the sizes of Mamba 2 beside attention; the model's multipliers are part of the weights in a file.

    A tied table is refused: it has the embedding's multiplier, and a head's would be lost.
    """
    if "output.weight" not in header.tensors:
        own["output.weight"] = "tied"
    if (found := sizes(own)) is None:
        return
    fields |= {
        **_sizes_beside_attention(header, found),
        "mamba_d_ssm": found[4],
        "mamba_rms_norm": header.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _sizes_beside_attention(header: GgufHeader, found: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields that have the sizes of Mamba 2 in models with attention."""
    width, state, groups, heads, inner = found
    return {
        "mamba_d_conv": width, "mamba_d_state": state, "mamba_n_groups": groups, "mamba_n_heads": heads,
        "mamba_d_head": inner // heads, "mamba_conv_bias": header.has_tensor(CONVOLUTION_BIAS),
    }  # fmt: skip


def sizes_of_nemotron(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the sizes of Mamba 2, and which layer is what: one has heads of keys, a forward network, or neither."""
    found, heads = sizes(own), numbers_of_layers(own, KEY_HEADS)
    forward = numbers_of_layers(own, FORWARD)
    if found is None or heads is None or forward is None:
        return
    network = "moe" if own.get("expert_count") else "mlp"
    width, state, groups, num_heads, inner = found
    kinds = ["attention" if keys else network if size else "mamba" for keys, size in zip(heads, forward, strict=True)]
    fields |= {
        "conv_kernel": width, "ssm_state_size": state, "n_groups": groups, "mamba_num_heads": num_heads,
        "mamba_head_dim": inner // num_heads, "num_key_value_heads": max(heads), "intermediate_size": max(forward),
        "layers_block_type": kinds,
        "use_conv_bias": header.has_tensor(CONVOLUTION_BIAS),
    }  # fmt: skip
    if own.get("rope.scaling.finetuned") is False:  # no layer rotates
        del own["rope.scaling.finetuned"]
        own.pop("rope.dimension_count", None)
    epsilon = own.get("attention.layer_norm_rms_epsilon")
    if own.get("attention.layer_norm_epsilon", epsilon) == epsilon:
        own.pop("attention.layer_norm_epsilon", None)
