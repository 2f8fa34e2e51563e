"""Layers of Mamba 2 and of short convolutions, beside layers with attention: sizes, kinds of layers, parts."""

from typing import Any

from offload.gguf.family import KEY_HEADS, Part, Rule
from offload.gguf.header import GgufHeader
from offload.gguf.numbers import wrong_value
from offload.gguf.parts import convolution, logarithm, module, named, vector

CONVOLUTION_BIAS = "ssm_conv1d.bias"  # of the channels
SIZES = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
ROTATES = "rope.scaling.finetuned"  # whether attention does, in families with recurrent layers
FORWARD = "feed_forward_length"


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


def sizes(header: GgufHeader, own: dict[str, Any], *, groups_divide_heads: bool = False) -> tuple[int, ...]:
    """Take the sizes of a recurrent layer: width, state, groups, heads, and all heads together.

    Raises CheckpointError for sizes that are none, heads that are no parts of their whole, or with
    `groups_divide_heads` uneven groups.
    """
    found: tuple[int, ...] = tuple(own.pop(f"ssm.{name}", 0) for name in SIZES)
    for name, size in zip(SIZES, found, strict=True):
        if size < 1:
            raise wrong_value(header, f"ssm.{name}", size, "a whole number from 1 on")
    _, _, groups, heads, inner = found
    if inner % heads:
        raise wrong_value(header, "ssm.time_step_rank", heads, f"a part of ssm.inner_size = {inner}")
    if groups_divide_heads and heads % groups:
        raise wrong_value(header, "ssm.group_count", groups, f"a part of ssm.time_step_rank = {heads}")
    return found


def _check_rows(header: GgufHeader, found: tuple[int, ...]) -> None:
    """Raise CheckpointError for sizes that do not make up the rows of a layer's first matrix."""
    _, state, groups, heads, inner = found
    rows = 2 * (inner + groups * state) + heads
    for name, tensor in header.tensors.items():
        if name.endswith(".ssm_in.weight") and tensor.shape[0] != rows:
            others = f"ssm.inner_size = {inner}, ssm.group_count = {groups} and ssm.time_step_rank = {heads}"
            what = f"what makes the {tensor.shape[0]} rows of '{name}', with {others}"
            raise wrong_value(header, "ssm.state_size", state, what)


def numbers_of_layers(header: GgufHeader, own: dict[str, Any], key: str) -> list[int]:
    """Take a number of each layer, which is one for all that are not 0; raises CheckpointError for something else."""
    found, count = own.pop(key, None), own["block_count"]
    if not isinstance(found, list) or len(found) < count or len({*found[:count]} - {0}) > 1:
        raise wrong_value(header, key, found, "one number for all layers that have it, and 0 for others")
    return found[:count]


def _expansion(header: GgufHeader, own: dict[str, Any], found: tuple[int, ...]) -> int:
    hidden: int = max(own["embedding_length"], 1)
    if found[4] % hidden:
        raise wrong_value(header, "ssm.inner_size", found[4], f"a multiple of embedding_length = {hidden}")
    return found[4] // hidden


def attention_where(other: str, *, attention: str = "full_attention") -> Rule:
    """Return the rule that finds layers with attention: those that have heads of keys."""

    def rule(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
        heads = numbers_of_layers(header, own, KEY_HEADS)
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
    found = sizes(header, own)
    fields |= {**_sizes_beside_attention(header, found), "mamba_expand": _expansion(header, own, found)}
    fields["position_embedding_type"] = "rope" if own.pop(ROTATES, True) else "nope"


def sizes_of_mamba(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the sizes of a model of Mamba 2 alone; its files state no heads and no network, which are dropped again."""
    heads = ("attention.head_count", FORWARD)
    for key in (*heads, KEY_HEADS, "attention.key_length", "attention.value_length", "rope.dimension_count"):
        if (stated := own.pop(key, 0)) != 0:
            raise wrong_value(header, key, stated, "0 in a model without attention")
    own |= dict.fromkeys(heads, 1)
    found = sizes(header, own)
    width, state, groups, num_heads, inner = found
    _check_rows(header, found)
    fields |= {
        "conv_kernel": width, "state_size": state, "n_groups": groups, "num_heads": num_heads,
        "head_dim": inner // num_heads, "expand": _expansion(header, own, found),
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
    found = sizes(header, own)
    fields |= {
        **_sizes_beside_attention(header, found),
        "mamba_d_ssm": found[4],
        "mamba_rms_norm": header.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _sizes_beside_attention(header: GgufHeader, found: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields that have the sizes of Mamba 2 in models with attention."""
    _check_rows(header, found)
    width, state, groups, heads, inner = found
    return {
        "mamba_d_conv": width, "mamba_d_state": state, "mamba_n_groups": groups, "mamba_n_heads": heads,
        "mamba_d_head": inner // heads, "mamba_conv_bias": header.has_tensor(CONVOLUTION_BIAS),
    }  # fmt: skip


def sizes_of_nemotron(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the sizes of Mamba 2, and which layer is what: one has heads of keys, a forward network, or neither."""
    found = sizes(header, own)
    heads, forward = (numbers_of_layers(header, own, key) for key in (KEY_HEADS, FORWARD))
    _check_rows(header, found)
    network = "moe" if own.get("expert_count") else "mlp"
    width, state, groups, num_heads, inner = found
    kinds = ["attention" if keys else network if size else "mamba" for keys, size in zip(heads, forward, strict=True)]
    fields |= {
        "conv_kernel": width, "ssm_state_size": state, "n_groups": groups, "mamba_num_heads": num_heads,
        "mamba_head_dim": inner // num_heads, "num_key_value_heads": max(heads), "intermediate_size": max(forward),
        "layers_block_type": kinds,
        "use_conv_bias": header.has_tensor(CONVOLUTION_BIAS),
    }  # fmt: skip
    if own.pop(ROTATES, False):
        raise wrong_value(header, ROTATES, True, "false: no layer rotates")
    own.pop("rope.dimension_count", None)
    epsilon = own.get("attention.layer_norm_rms_epsilon")
    if own.get("attention.layer_norm_epsilon", epsilon) == epsilon:
        own.pop("attention.layer_norm_epsilon", None)
