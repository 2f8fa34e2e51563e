"""What a GGUF file's settings are in a config.json. All of them are read, or the file is refused by name."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from offload.gguf.drafts import DRAFTS
from offload.gguf.families import FAMILIES
from offload.gguf.family import HEAD_DIM, KEY_HEADS, SETTINGS, Family
from offload.gguf.header import TOKENS, GgufHeader, TextList
from offload.gguf.kinds import is_further_layer
from offload.gguf.numbers import wrong_value
from offload.gguf.refusal import not_read, number
from offload.gguf.rotation import rotation_scaling
from offload.gguf.silence import drop_what_says_nothing, replace_zeros
from offload.gguf.values import check_values
from offload.gguf.vocabulary import START, end_tokens

WIDTH, ROUTER, OUTPUT, KEYS = "token_embd.weight", "ffn_gate_inp.weight", "attn_output.weight", "attn_k.weight"
BY = "by attention.key_length, rope.dimension_count or embedding_length"  # where a file has the size of a head
USED, GROUPS, GROUPS_USED = "expert_used_count", "expert_group_count", "expert_group_used_count"
OF_GROUPS = {GROUPS: "n_group", GROUPS_USED: "topk_group"}


def check_counts(header: GgufHeader, stated: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a count, as it is `stated`, of more than there are."""
    layers, experts = fields["num_hidden_layers"], stated.get("expert_count")
    groups, groups_used = (stated.get(key) or fields.get(name) or 1 for key, name in OF_GROUPS.items())
    most = {
        "leading_dense_block_count": (layers, "layers"),
        "attention.shared_kv_layers": (layers - (header.architecture not in DRAFTS), "other layers"),
    }
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
        key, count, place, expected = sizes.get(name.partition(".")[2].partition(".")[2], ("", 0, 0, ()))
        if key and tensor.shape[place] not in expected:
            what = f"what '{name}' of the shape {list(tensor.shape)} has, with heads of {max(of_all, of_values)} {BY}"
            raise wrong_value(header, key, count, what)


SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
RMS_NORM, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"  # a family has one of them
NEEDED = {*SETTINGS, LAYER_NORM} - {KEY_HEADS, "rope.freq_base"}
FRACTIONS = {"rms_norm_eps", "rope_theta"}
DEFAULT_BASE = 10000.0  # of a rotation
SHARED = "attention.shared_kv_layers"
MOST_LAYERS = 1024  # that a model may have whose file has the layer for a further token alone
SIZE = "which is attention.key_length, or embedding_length over attention.head_count"


def family_of(header: GgufHeader) -> Family:
    """Return the line of the table; raises CheckpointError for an architecture that has none."""
    name = header.architecture
    with_experts = f"{name} with experts" if header.settings.get(f"{name}.expert_count") else name
    family = FAMILIES.get(with_experts) or FAMILIES.get(name) or DRAFTS.get(name)
    if family is None:
        raise not_read(header, f"is of the architecture '{header.architecture}'")
    return family


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of a config.json; raises CheckpointError for a setting that is not understood."""
    family, own = family_of(header), _own_settings(header)
    if isinstance(own.get(SHARED), float) and own[SHARED].is_integer():  # as the first files of Gemma 3n have it
        own[SHARED] = int(own[SHARED])
    check_values(header, family, own)
    known = {**SETTINGS, **family.settings}
    if LAYER_NORM in family.settings:
        del known[RMS_NORM]
    fields: dict[str, Any] = {"model_type": family.model_type, "rope_theta": DEFAULT_BASE, **family.fixed}
    needed = [key for key, name in known.items() if key in NEEDED and name not in fields]
    missing = next((key for key in (*needed, *sorted(family.needs)) if key not in own), None)
    if missing is not None:
        raise not_read(header, f"lacks the setting {header.architecture}.{missing}")
    num_layers = own["block_count"]
    most = MOST_LAYERS if is_further_layer(header) else len(header.tensors)
    if type(num_layers) is not int or not 0 < num_layers <= most:  # by which lists are made
        raise not_read(header, f"has {len(header.tensors)} tensors and states {num_layers} layers")
    replace_zeros(own, known)
    for rule in family.first:
        rule(header, own, fields)
    for key, name in known.items():
        if key in own:
            fields[name] = number(header, key, own.pop(key))
    fields["num_key_value_heads"] = fields.get("num_key_value_heads", fields["num_attention_heads"])
    _check_sizes(header, fields)
    rotated = own.pop("rope.dimension_count", None)
    whole = fields["hidden_size"] // fields["num_attention_heads"]
    head_dim = fields.get("head_dim", rotated if type(rotated) is int and family.rotates_neighbours else whole)
    if "head_dim" in known.values():
        fields["head_dim"] = head_dim
    _check_heads(header, family, own, head_dim, rotated)
    if rotated not in (None, head_dim):
        fields["partial_rotary_factor"] = rotated / head_dim
    if family.query_scale_layers:  # of Gemma 2 and 3
        is_scaled_by_size = fields["num_hidden_layers"] == family.query_scale_layers
        fields["query_pre_attn_scalar"] = whole if is_scaled_by_size else head_dim
    vocab = _vocab_size(header)
    if own.pop("vocab_size", vocab) != vocab:
        raise not_read(header, f"has {vocab} rows of token_embd.weight and another {header.architecture}.vocab_size")
    fields |= {"vocab_size": vocab, "tie_word_embeddings": "output.weight" not in header.tensors}
    fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    fields |= {ours: _token(header, theirs, vocab) for theirs, ours in SPECIAL.items()}
    scaling = rotation_scaling(header, family, own, fields)
    if scaling:
        fields["rope_scaling"] = scaling
    for rule in family.rules:
        rule(header, own, fields)
    drop_what_says_nothing(own, fields, family.means)
    if own:
        key, value = next(iter(own.items()))
        raise not_read(header, f"states {header.architecture}.{key} = {value}")
    check_counts(header, _own_settings(header), fields)
    check_heads(header, head_dim, fields)
    return fields


def _vocab_size(header: GgufHeader) -> int:
    """Return the number of tokens: of the table's rows, or where a draft has none, of those that the file names."""
    if WIDTH in header.tensors:
        return header.tensors[WIDTH].shape[0]
    if header.architecture not in DRAFTS and not is_further_layer(header):
        return 0
    stated, tokens = header.settings.get(f"{header.architecture}.vocab_size"), header.settings.get(TOKENS)
    return stated if type(stated) is int else tokens.count if isinstance(tokens, TextList) else 0


def _own_settings(header: GgufHeader) -> dict[str, Any]:
    start = f"{header.architecture}."
    return {key.removeprefix(start): value for key, value in header.settings.items() if key.startswith(start)}


def _token(header: GgufHeader, name: str, vocab: int) -> int | None:
    """Return a token by its use; None for one that the model has not, as converters of fine-tunes name for padding."""
    found = header.settings.get(f"tokenizer.ggml.{name}_token_id")
    return found if type(found) is int and 0 <= found < vocab else None


def _check_sizes(header: GgufHeader, fields: dict[str, Any]) -> None:
    """Raise CheckpointError for sizes by which nothing can be divided."""
    for key, name in (*SETTINGS.items(), *HEAD_DIM.items()):
        is_number = type(fields.get(name)) is int or name in FRACTIONS
        if name in fields and not (is_number and fields[name] > 0) and not isinstance(fields[name], list):
            raise not_read(header, f"states {header.architecture}.{key} = {fields[name]}")
    if fields["num_attention_heads"] > fields["hidden_size"]:
        sizes = f"{fields['num_attention_heads']} heads of {fields['hidden_size']} numbers"
        raise not_read(header, f"states {sizes}")


def _check_heads(header: GgufHeader, family: Family, own: dict[str, Any], head_dim: int, rotated: int | None) -> None:
    is_part = family.rotates_in_part and rotated is not None and 0 < rotated < head_dim and rotated % 2 == 0
    if head_dim < 1 or not (rotated in (None, head_dim) or is_part):
        raise not_read(header, f"states {header.architecture}.rope.dimension_count = {rotated} of {head_dim}, {SIZE}")
    for key in ("attention.key_length", "attention.value_length"):
        found = own.pop(key, head_dim)
        if found != head_dim:
            raise not_read(header, f"states {header.architecture}.{key} = {found}, with heads of {head_dim}, {SIZE}")


SAMPLING = "general.sampling."
NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # others have the same
DRAWS = {"temperature", "top_k", "top_p", "min_p"}  # where one is stated, tokens are drawn
WHOLE_CONTEXT = -1  # of `penalty_last_n`: as many tokens as there are, as a repetition penalty has it
WITH_MIROSTAT = ("mirostat_tau", "mirostat_eta")  # which say nothing without it
WITH_XTC = ("xtc_threshold",)


def generation_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields; a sampler that only llama.cpp has keeps its name."""
    found = {
        NAMES.get(name := key.removeprefix(SAMPLING), name): _short(value)
        for key, value in header.settings.items()
        if key.startswith(SAMPLING)
    }
    if found.get("penalty_last_n") == WHOLE_CONTEXT or found.get("repetition_penalty", 1.0) == 1.0:
        found.pop("penalty_last_n", None)
    for sampler, names in (("mirostat", WITH_MIROSTAT), ("xtc_probability", WITH_XTC)):
        if not found.get(sampler):
            found = {name: value for name, value in found.items() if name not in {sampler, *names}}
    if found.keys() & DRAWS:
        found["do_sample"] = found.get("temperature") != 0
    ends, suppressed = end_tokens(header), header.settings.get(f"{START}suppress_tokens")
    lists = {"eos_token_id": ends, "suppress_tokens": suppressed}
    return {**found, **{name: tokens for name, tokens in lists.items() if tokens}}


def _short(value: Any) -> Any:
    """Return a number as somebody wrote it: 0.6 in float32 is another one in float64."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.6g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value
