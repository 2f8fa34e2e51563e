"""What the settings of mixtures mean: rules that take them before others are read, or change fields afterwards."""

import math
import re
from typing import Any

from offload.gguf.family import KEY_HEADS, Rule
from offload.gguf.header import GgufHeader
from offload.gguf.numbers import shortest, wrong_value
from offload.gguf.rules import PATTERN

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of functions that give scores
# What published models of DeepSeek's form have, which files of before October 2025 do not state: groups, groups used.
GROUPS = {64: (1, 1), 160: (8, 3), 256: (8, 4), 384: (1, 1)}
MAVERICK_EXPERTS = 128
# Of keys and values, and of what becomes of them
LATENT = ("key_length", "value_length", "key_length_mla", "value_length_mla")
FURTHER = re.compile(r"blk\.(\d+)\.nextn\.eh_proj\.weight")
CHUNKS_EVERY = 4  # layer that sees all
CONSTANTS = {"attention.sliding_window": "attention_chunk_size", "attention.temperature_scale": "attn_scale"}


def further_layers(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Leave out the last layers, which predict further tokens; files have them without stating any, and reversely."""
    blocks, count = own.get("block_count"), own.get("nextn_predict_layers", 0)
    if type(count) is not int or type(blocks) is not int or not 0 <= count < blocks:
        return
    own.pop("nextn_predict_layers", None)
    stored = [int(found[1]) for name in header.tensors if (found := FURTHER.fullmatch(name))]
    if stored and not count:
        blocks, count = min(stored) + len(stored), len(stored)
    elif not stored and any(name.startswith(f"blk.{blocks - 1}.") for name in header.tensors):
        blocks += count
    own["block_count"] = blocks - count
    fields["num_nextn_predict_layers"] = count


def states_further_layers(header: GgufHeader) -> bool:
    """Return whether a file states the layers for further tokens that it has."""
    return bool(header.settings.get(f"{header.architecture}.nextn_predict_layers"))


def same_size(_: GgufHeader, own: dict[str, Any], __: dict[str, Any]) -> None:
    """Take the size of experts, where it is stated twice."""
    if own.get("expert_feed_forward_length") == own.get("feed_forward_length"):
        own.pop("expert_feed_forward_length", None)


def scores(*functions: int) -> Rule:
    """Return the rule that takes the function of scores, where it is one that the family has, or not stated."""

    def rule(_: GgufHeader, own: dict[str, Any], __: dict[str, Any]) -> None:
        if own.get("expert_gating_func") in functions:
            del own["expert_gating_func"]

    return rule


def normalised(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take whether the weights of chosen experts add up to one, which is stated where they do.

    DeepSeek V2's code in transformers cannot do it: such a file is refused.
    """
    are_allowed = {False} if fields["model_type"] == "deepseek_v2" else {False, True}
    stated = own.get("expert_weights_norm", False)
    if isinstance(stated, bool) and stated in are_allowed:
        fields["norm_topk_prob"] = own.pop("expert_weights_norm", False)


def whole_correction(_: GgufHeader, __: dict[str, Any], fields: dict[str, Any]) -> None:
    """Give gpt-oss' scaling the borders that are not rounded; without one there is none, as transformers has it."""
    scaling = fields.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False


def latent_attention(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the sizes of attention whose keys and values are made of fewer numbers, and tell V2 from V3."""
    rotated, rank, heads = (own.pop(key, 0) for key in ("rope.dimension_count", "attention.kv_lora_rank", KEY_HEADS))
    keys, values, of_keys, of_values = (own.pop(f"attention.{key}", 0) for key in LATENT)
    if not of_keys:  # a file of before keys and values were split
        of_keys, of_values = keys, values
    elif (keys, values) != (rank + rotated, rank):
        key, one, size = ("value", values, rank) if values != rank else ("key", keys, rank + rotated)
        what = f"{size}, which come of attention.kv_lora_rank = {rank} and rope.dimension_count = {rotated}"
        raise wrong_value(header, f"attention.{key}_length", one, what)
    if not 0 < rotated < of_keys:
        what = f"less than the {of_keys} of attention.key_length_mla or attention.key_length, and not 0"
        raise wrong_value(header, "rope.dimension_count", rotated, what)
    if heads not in (0, 1, own["attention.head_count"]):
        raise wrong_value(header, KEY_HEADS, heads, f"1, or attention.head_count = {own['attention.head_count']}")
    fields |= {
        "num_key_value_heads": own["attention.head_count"], "kv_lora_rank": rank, "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": of_keys - rotated, "v_head_dim": of_values, "head_dim": rotated,
        "q_lora_rank": own.pop("attention.q_lora_rank", None) or None,
    }  # fmt: skip
    scale = own.get("rope.scaling.yarn_log_multiplier")
    if scale is not None:  # a tenth, here alone
        own["rope.scaling.yarn_log_multiplier"] = float(f"{shortest(scale) * 10:.6g}")


def routing_of_deepseek(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Tell V2, whose scores are a softmax, from V3, whose scores have corrections; and find the groups of experts."""
    has_corrections = header.has_tensor("exp_probs_b.bias")
    scores(SIGMOID if has_corrections else SOFTMAX)(header, own, fields)
    count = own.get("expert_count")
    groups, used = GROUPS.get(count if type(count) is int else 0, (None, None))
    own.setdefault("expert_group_count", groups)
    own.setdefault("expert_group_used_count", used)
    if fields["model_type"] != "deepseek_v2":  # which states its own
        return
    if has_corrections:
        fields["model_type"] = "deepseek_v3"
    else:
        is_grouped = own["expert_group_count"] not in (None, 1)
        fields["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"


def sizes_of_index(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise CheckpointError for sizes of an index that choose no keys, or do not hold what rotates."""
    least = {"attention.indexer.key_length": fields["qk_rope_head_dim"], "attention.indexer.top_k": 1}
    for key, number in {**least, "attention.indexer.head_count": 1}.items():
        if own.get(key, number) < number:
            raise wrong_value(header, key, own[key], f"a whole number from {number} on")
    if not fields["q_lora_rank"]:
        raise wrong_value(header, "attention.q_lora_rank", 0, "a whole number from 1 on")


def layers_with_index(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take which layers have an index of their own; the others see what the index before them chose."""
    count, stated = own["block_count"], own.pop("attention.indexer.types", None)
    if stated is None:
        stated = [f"blk.{layer}.indexer.proj.weight" in header.tensors for layer in range(count)]
    if not isinstance(stated, list) or len(stated) < count or not {*stated} <= {False, True} or not stated[0]:
        raise wrong_value(header, "attention.indexer.types", stated, f"true or false for each of {count} layers")
    fields["indexer_types"] = ["full" if has_index else "shared" for has_index in stated[:count]]


def scaling_of_deepseek(_: GgufHeader, __: dict[str, Any], fields: dict[str, Any]) -> None:
    """Give the scaling its other number, for which llama.cpp takes the one in the file."""
    scaling = fields.get("rope_scaling", {})
    if "mscale_all_dim" in scaling:
        scaling["mscale"] = scaling["mscale_all_dim"]


def shared_of_granite(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Tell whether all tokens pass an expert of their own."""
    if own.get("expert_shared_feed_forward_length"):
        fields["model_type"] = "granitemoeshared"
    elif own.get("expert_shared_feed_forward_length") == 0:
        del own["expert_shared_feed_forward_length"]


def shared_of_ernie(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the size of shared experts, of which llama.cpp's converter writes another number than the model's."""
    own.pop("expert_shared_feed_forward_length", None)
    if own.get("expert_weights_scale") == 1.0:
        del own["expert_weights_scale"]


def lists_of_hunyuan(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the one size of all experts."""
    size = own.get("feed_forward_length")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if own.get(key) == size:
            del own[key]
    if own.get("expert_shared_count") == 1:
        fields["num_shared_expert"] = own.pop("expert_shared_count")


def sizes_of_llama4(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the size of layers without experts; of the published models only the one of 128 experts has no norms."""
    fields["intermediate_size_mlp"] = own.pop("feed_forward_length", None)
    fields["use_qk_norm"] = own.get("expert_count") != MAVERICK_EXPERTS
    if "expert_feed_forward_length" in own:
        own["feed_forward_length"] = own.pop("expert_feed_forward_length")
    count = own.get("block_count")
    chunked = [(layer + 1) % CHUNKS_EVERY != 0 for layer in range(count)] if type(count) is int else None
    if own.get(PATTERN) in (chunked, CHUNKS_EVERY):
        own.pop(PATTERN, None)
    for key, name in CONSTANTS.items():
        if isinstance(own.get(key), int | float) and math.isclose(own[key], fields[name], rel_tol=1e-6):
            del own[key]
