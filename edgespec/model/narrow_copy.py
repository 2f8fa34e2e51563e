"""A copy of a configuration with few and narrow layers, and a random model of it, for trials of a family's code."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.model.layer_kinds import layer_overrides
from edgespec.model.mechanisms.known import MECHANISMS
from edgespec.model.mechanisms.windows import key_sources
from offload.skeleton import build_on_meta
from offload.text_part import drop_parameters, unread_names

VOCAB = 96
HEADS = 4
HEAD_DIM = 16  # of families without heads
# Reduced where a configuration has them; their ratios are kept.
HEAD_NAMES = (
    "num_attention_heads", "encoder_attention_heads", "decoder_attention_heads",
    "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
LAYER_COUNTS = (  # where a family has them
    "num_hidden_layers", "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_blocks",
)  # fmt: skip
WIDTH_NAMES = ("attention_hidden_size", "lru_width", "embedding_dim")
NARROW = {
    "intermediate_size": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "mlp_only_layers": 0,
    # Limits that numbers of a narrow copy reach
    "attn_logit_softcapping": 2.0,
    "clip_qkv": 1.0,
    "swiglu_limit": 1.0,
    **{name: size for record in MECHANISMS for name, size in record.small_sizes.items()},
}
AT_MOST = {
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,  # so that the first layer's MLP is dense, and the second's a mixture
    "num_dense_layers": 1,
    "decoder_sparse_step": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 2,
    # Jamba's second layer has attention, or experts, where some of its layers do
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
}
SMALL_LENGTH = 24  # to which positions rotate otherwise than behind it: within the trials' longer text
MOST_VALUES = 4  # that layers may have of a setting, each of which makes a kind; of more, what differs from the first's
CORRECTION = 0.2  # of buffers that begin as zeros, as of a router's scores
UNTOUCHED = 0.1  # value of parameters that the family's own initialisation leaves out


def keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Reduce a text part to these layers, with their own values."""
    text: Any = config
    overrides, num_layers = layer_overrides(text), text.num_hidden_layers
    changes = {name: value for record in MECHANISMS for name, value in record.kept_layers(text, layers).items()}
    text.per_layer_config = None
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers and name not in ("architectures", *changes):
            setattr(text, name, [value[layer] for layer in layers])
    for name in LAYER_COUNTS:
        if getattr(text, name, None):
            with suppress(NotImplementedError):  # ProphetNet's first one stands for another
                setattr(text, name, len(layers))
    for name, value in changes.items():
        setattr(text, name, value)
    text.per_layer_config = {
        index: overrides[layer] for index, layer in enumerate(layers) if layer in overrides
    } or None


def narrow_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration with two layers, or one of each kind, and little width."""
    small = copy.deepcopy(config)
    small.__dict__.pop("quantization_config", None)
    if small.model_type == "blt":
        return _narrow_stacks(small)
    text: Any = small.get_text_config(decoder=True)
    small.name_or_path = text.name_or_path = ""  # the trial of a family is that of all its folders
    if not any(text is part for part in (small, *vars(small).values())):
        text = small  # an encoder with a decoder: `get_text_config` returned a copy
    keep_layers(text, _one_layer_of_each_kind(text))
    overrides = layer_overrides(text)
    text.per_layer_config = None
    # Pure Mamba models have `num_heads`, or neither; their width is reduced to that of HEADS heads, too.
    heads = getattr(text, "num_attention_heads", None) or getattr(text, "num_heads", None)
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else HEAD_DIM)
    names = (*NARROW, *AT_MOST, *HEAD_NAMES, "num_key_value_heads")
    changes = _narrowed({name: getattr(text, name, None) for name in names}, heads or 1)
    if getattr(text, "n_recurrent_layers", None):
        changes |= {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
    if getattr(text, "num_layers_per_stack", None):  # of HRM's two stacks, whose passings are counted as layers
        changes |= {"num_layers_per_stack": 1, "num_hidden_layers": text.H_cycles * (text.L_cycles + 1)}
    for record in MECHANISMS:
        changes |= record.narrow(text, HEADS * head_dim)
    changes |= _width_changes(text, HEADS * head_dim) | _groups(text)
    _shorten(text)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            changes[name] = 0
    if "head_dim" in vars(text):
        changes["head_dim"] = head_dim
    for name in ("vocab_size_per_layer_input", "unpadded_vocab_size"):
        if getattr(text, name, None):
            changes[name] = VOCAB
    if getattr(text, "word_embed_proj_dim", None):
        changes["word_embed_proj_dim"] = HEADS * head_dim
    for name, value in {**changes, "hidden_size": HEADS * head_dim, "vocab_size": VOCAB}.items():
        setattr(text, name, value)
    if overrides:
        whole = config.get_text_config(decoder=True)
        num_heads = whole._getattr_without_heterogeneous_validation("num_attention_heads")
        text.per_layer_config = {layer: _narrowed(own, num_heads) for layer, own in overrides.items()}
    return small


def _narrow_stacks(small: Any) -> PretrainedConfig:
    """Return BLT's configuration with narrow stacks, each of which has one of its own."""
    small.patcher_config, small.global_config = narrow_copy(small.patcher_config), narrow_copy(small.global_config)
    small.encoder_config, small.decoder_config = narrow_copy(small.encoder_config), narrow_copy(small.decoder_config)
    small.encoder_config.hidden_size_global = small.decoder_config.hidden_size_global = small.global_config.hidden_size
    joined = small.encoder_config.hidden_size * small.cross_attn_k
    if small.global_config.encoder_cross_output_size or joined != small.global_config.hidden_size:
        small.global_config.encoder_cross_output_size = joined
    small.vocab_size = small.encoder_hash_byte_group_vocab = VOCAB
    small.name_or_path = ""
    narrow: PretrainedConfig = small
    return narrow


def _groups(text: Any) -> dict[str, int]:
    """Return two groups of experts, or one, of which a row's experts are of as few as the family's may be."""
    num_groups = getattr(text, "n_group", None) or 1
    is_limited = (getattr(text, "topk_group", None) or num_groups) < num_groups
    names = [name for name in ("n_group", "topk_group") if getattr(text, name, None)]
    return {name: 2 if is_limited and name == "n_group" else 1 for name in names}


def _shorten(text: Any) -> None:
    """Let the trials' texts reach positions that a family treats otherwise than the first ones."""
    name, rope = "original_max_position_embeddings", getattr(text, "rope_parameters", None) or {}
    for kind in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if kind.get(name):
            kind[name] = SMALL_LENGTH
    if vars(text).get(name):
        setattr(text, name, SMALL_LENGTH)


def _narrowed(values: dict[str, Any], num_heads: int) -> dict[str, Any]:
    """Return the values of a configuration or of a layer, with small numbers in place of those that are set."""
    num_heads = values.get("num_attention_heads") or num_heads
    small = dict.fromkeys(HEAD_NAMES, HEADS) | NARROW | AT_MOST
    small |= {name: min(most, value) for name, most in AT_MOST.items() if isinstance(value := values.get(name), int)}
    small["num_key_value_heads"] = HEADS // 2 if (values.get("num_key_value_heads") or 0) < num_heads else HEADS
    return {
        name: [small[name]] * len(value) if name in small and isinstance(value, list) else small.get(name, value)
        for name, value in values.items()
        if value
    }


def _one_layer_of_each_kind(text: Any) -> list[int]:
    """Return indices of the first layer of each kind, and of at least two layers where there are two."""
    if getattr(text, "block_types", None):  # Recurrent Gemma's, which are repeated
        return list(range(min(len(text.block_types), text.num_hidden_layers)))
    if getattr(text, "n_recurrent_layers", None):  # Dory's, some of which are passed several times
        first, last = text.n_input_layers, text.num_hidden_layers - 1
        return [0, first, first + 1, last]
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    overrides, sources = layer_overrides(text), key_sources(text)
    of_layers = [value for value in vars(text).values() if isinstance(value, list) and len(value) == len(kinds)]
    of_kinds = [
        values if len({str(value) for value in values}) <= MOST_VALUES else [value == values[0] for value in values]
        for values in of_layers
    ]
    firsts: dict[str, int] = {}
    for layer, kind in enumerate(kinds):
        stated = (kind, overrides.get(layer), *(values[layer] for values in of_kinds))
        facts = (*stated, *(record.layer_facts(text, layer) for record in MECHANISMS))
        firsts.setdefault(str(facts), layer)
    kept = {*firsts.values(), *range(min(2, len(kinds)))} if len(firsts) == 1 else {*firsts.values()}
    lending = {sources[layer] for layer in kept} if getattr(text, "kv_source_layers", None) else set()
    return sorted(kept | lending)


def _width_changes(text: Any, hidden_size: int) -> dict[str, Any]:
    """Return the changed widths that go with the model's, beside that of its heads."""
    changes: dict[str, Any] = {
        name: getattr(text, name) * hidden_size // text.hidden_size for name in WIDTH_NAMES if getattr(text, name, None)
    }
    if "attention_head_dim" in vars(text) and "attention_hidden_size" in changes:
        changes["attention_head_dim"] = changes["attention_hidden_size"] // HEADS
    return changes


@torch.no_grad()
def random_model(config: PretrainedConfig, device: torch.device, *, with_towers: bool = False) -> PreTrainedModel:
    """Return the model with random weights, and without its towers for images unless they are asked for."""
    model = build_on_meta(config, "a narrow copy", dtype=torch.float32)
    unread = frozenset() if with_towers else unread_names(model)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{path}.{name}".removeprefix(".") not in unread:
                weight = torch.full_like(parameter, UNTOUCHED, device="cpu")
                module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        if not all(parameter.is_meta for parameter in module.parameters()):
            module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()
    model.tie_weights()
    drop_parameters(model, unread)
    nn.Module.to(model, device)
    for parameter in model.parameters():
        if parameter.dim() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.normal_(std=UNTOUCHED)  # equal numbers would hide what they do
        elif parameter.dim() > 1:
            parameter.mul_(4)  # so that attention looks somewhere, and a wrong place shows
        else:  # ones and zeros would hide what they do, too
            parameter.add_(UNTOUCHED * torch.randn(parameter.shape).to(parameter))
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.ndim == 1 and not buffer.any():
            buffer.add_(CORRECTION * torch.randn(buffer.shape).to(buffer))
    return model
