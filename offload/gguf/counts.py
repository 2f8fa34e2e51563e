"""Counts of a GGUF file's settings that say more than others have, or another number than its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.gguf.family import KEY_HEADS
from offload.gguf.header import GgufHeader
from offload.gguf.numbers import wrong_value

WIDTH, ROUTER, OUTPUT, KEYS = "token_embd.weight", "ffn_gate_inp.weight", "attn_output.weight", "attn_k.weight"
BY = "by attention.key_length, rope.dimension_count or embedding_length"  # where a file has the size of a head
USED, GROUPS, GROUPS_USED = "expert_used_count", "expert_group_count", "expert_group_used_count"
OF_GROUPS = {GROUPS: "n_group", GROUPS_USED: "topk_group"}


def check_counts(header: GgufHeader, stated: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a count, as it is `stated`, of more than there are."""
    layers, experts = fields["num_hidden_layers"], stated.get("expert_count")
    groups, groups_used = (stated.get(key) or fields.get(name) or 1 for key, name in OF_GROUPS.items())
    most = {"leading_dense_block_count": (layers, "layers"), "attention.shared_kv_layers": (layers - 1, "other layers")}
    if "altup_num_inputs" in fields:
        most["altup.active_idx"] = (fields["altup_num_inputs"] - 1, "further inputs")
    if experts:
        most |= {USED: (experts, "experts"), GROUPS: (experts, "experts"), GROUPS_USED: (groups, "groups of experts")}
        router = next((one for name, one in header.tensors.items() if name.endswith(ROUTER)), None)
        if router is not None and router.shape[0] != experts:
            raise wrong_value(header, "expert_count", experts, f"what '{router.name}' has {router.shape[0]} rows for")
        if stated.get(USED) == 0:
            raise wrong_value(header, USED, 0, f"a whole number from 1 to its {experts} experts")
    for key, (limit, things) in most.items():
        if stated.get(key, 0) > limit:
            raise wrong_value(header, key, stated[key], f"a whole number up to its {limit} {things}")
    if not experts or groups == 1:
        return
    if experts % groups or experts == groups:
        raise wrong_value(header, GROUPS, groups, f"a number of groups of two or more among {experts} experts")
    if stated.get(USED, 0) > groups_used * (experts // groups):
        what = f"a number of groups, of {GROUPS} = {groups}, that have the experts of {USED} = {stated[USED]}"
        raise wrong_value(header, GROUPS_USED, groups_used, what)


def check_heads(header: GgufHeader, head_dim: int, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError for another width, or number of heads, than the tensors have."""
    if WIDTH in header.tensors and (width := header.tensors[WIDTH].shape[-1]) != fields["hidden_size"]:
        raise wrong_value(header, "embedding_length", fields["hidden_size"], f"{width}, as '{WIDTH}' has it")
    of_all, of_values = fields.get("global_head_dim", head_dim), fields.get("v_head_dim", head_dim)
    heads, keys = fields.get("num_attention_heads", 0), fields.get("num_key_value_heads", 0)
    sizes = {
        OUTPUT: ("attention.head_count", heads, -1, {heads * of_values, heads * of_all}),
        KEYS: (KEY_HEADS, keys, 0, {keys * head_dim, fields.get("num_global_key_value_heads", keys) * of_all}),
    }
    num_own = fields["num_hidden_layers"] - fields.get("num_kv_shared_layers", 0)  # keys, and no copies of others
    for name, tensor in header.tensors.items():
        layer = name.partition(".")[2].partition(".")[0]
        if not layer.isdecimal() or int(layer) >= num_own:
            continue
        key, count, place, expected = sizes.get(name[name.rfind("attn_") :], ("", 0, 0, ()))
        if key and tensor.shape[place] not in expected:
            what = f"what '{name}' of the shape {list(tensor.shape)} has, with heads of {max(of_all, of_values)} {BY}"
            raise wrong_value(header, key, count, what)
