"""Tiny targets whose checkpoint holds a multi-token-prediction layer in its family's layout."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from edgespec.draft.mtp import mtp_config
from edgespec.draft.readings import AS_STATED, Reading
from tests.support.families import make_model, save_folder
from tests.support.tiny_configs import tiny_config

NUMBERED_OWN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
NAMED_OWN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
SHARP = ("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight")
SHARPNESS = 4.0
# of those that transformers has: of indexed ones not the oldest that we take
INDEXED = [kind for kind in ("deepseek_v32", "glm_moe_dsa") if kind in CONFIG_MAPPING]
TYPES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", *INDEXED, "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def layer_model(target: PreTrainedModel) -> PreTrainedModel:
    """The family's own model of the one layer: its table, norm and head are not the target's yet.

    Attention is so sharp that a row's position shows in what it makes.
    """
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(mtp_config(target.config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in SHARP):
                parameter.mul_(SHARPNESS)
    return model


def own_weights(target: PreTrainedModel) -> dict[str, Tensor]:
    """What the layer has beside a decoder layer."""
    size, generator = int(target.config.hidden_size), torch.Generator().manual_seed(2)
    norms = {name: torch.rand(size, generator=generator) + 0.5 for name in ("enorm", "hnorm", "norm")}
    return {**norms, "eh_proj": torch.randn(size, 2 * size, generator=generator) / size**0.5}


def _norm(like: torch.nn.Module, weight: Tensor, rows: Tensor) -> Tensor:
    """The family's own norm, with another weight."""
    own = type(like)(rows.shape[-1], eps=like.variance_epsilon if hasattr(like, "variance_epsilon") else like.eps)
    own.weight.data = weight
    found: Tensor = own(rows)
    return found


@torch.no_grad()
def last_states(model: PreTrainedModel, *, is_normed: bool, **inputs: Tensor) -> Tensor:
    """The last hidden states [t, h], after the final norm or before it."""
    seen: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    normed: Tensor = model.model(**inputs, use_cache=False).last_hidden_state[0]
    handle.remove()
    return normed if is_normed else seen[0][0]


@torch.no_grad()
def reference(
    target: PreTrainedModel, text: list[int], path: list[int], reading: Reading = AS_STATED
) -> tuple[Tensor, Tensor]:
    """The page's forward, row by row: what is recycled [path, h] and logits [path, V] of a root and nodes below it."""
    weights, one = own_weights(target), layer_model(target)
    like = one.model.layers[0].input_layernorm
    features = last_states(target, is_normed=not reading.before_norm, input_ids=torch.tensor([text]))
    tokens, outputs = [*text[1:], *path], []
    one.model.norm.weight.data = weights["norm"]
    for count in range(len(text), len(text) + len(path)):
        embedded = _norm(like, weights["enorm"], target.get_input_embeddings()(torch.tensor(tokens[:count])))
        inputs = torch.cat([embedded, _norm(like, weights["hnorm"], features)], -1) @ weights["eh_proj"].T
        recycled = last_states(one, is_normed=not reading.flips_output, inputs_embeds=inputs[None])[-1:]
        outputs.append(recycled if not reading.flips_output else one.model.norm(recycled))
        features = torch.cat([features, recycled])
    return features[len(text) :], target.get_output_embeddings()(torch.cat(outputs))


def write_target(
    folder: Path, model_type: str, *, share: float | None = None, num_layers: int | None = None
) -> tuple[Path, PreTrainedModel]:
    """Write a tiny target of so many layers, and return it.

    The layer is random. With a `share`, decoder layers add only that share of what they would to a token's embedding,
    and the layer hands on the embedding alone: it guesses well, as a trained one does.
    """
    config = tiny_config(model_type)
    if num_layers is not None:
        kinds = {"num_hidden_layers": num_layers, "layer_types": None, "mlp_layer_types": None}
        config = type(config)(**{**config.to_dict(), **kinds})
    if not model_type.startswith("qwen"):
        config.num_nextn_predict_layers = 1
    target = make_model(config)
    if share is None:
        with torch.no_grad():  # a norm that weighs all alike is the same twice as once
            weight = target.model.norm.weight
            weight.add_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) - 0.5)
    layer, own = layer_model(target), own_weights(target)
    if share is not None:
        for model in (target, layer):
            _lower(model, share)
        own |= {name: target.model.norm.weight.data.clone() for name in ("enorm", "norm")}
        size = int(config.hidden_size)
        own["eh_proj"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    save_folder(folder, target)
    path = folder / "model.safetensors"
    stored = load_file(save_folder(folder / "layer", layer) / "model.safetensors")
    is_named = model_type.startswith("qwen")
    place = "mtp." if is_named else f"model.layers.{config.num_hidden_layers}."
    names = NAMED_OWN if is_named else NUMBERED_OWN
    found = {f"{place}{names[name]}.weight": weight for name, weight in own.items()}
    for name, weight in stored.items():
        if name.startswith("model.layers.0."):
            found[place + ("layers.0." if is_named else "") + name.removeprefix("model.layers.0.")] = weight
    found[f"{place}embed_tokens.weight"] = torch.zeros(3, 3)  # a copy, as some have it
    save_file(load_file(path) | found, path)
    return folder, target


def _lower(model: PreTrainedModel, share: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                parameter.mul_(share)
