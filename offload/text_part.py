"""The text part of a model: all of a language model, and of a model that also sees or hears, what words pass through.

A tower for images stays on the meta device: its weights are not read, and need not be there.
"""

import itertools
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from offload.errors import CheckpointError

_FIX = "Use a decoder-only model such as Llama, Qwen, Mistral, Gemma, Phi-3 or GPT-NeoX."

_TWO_IN_ONE = {"longcat_flash"}  # a layer of these families counts as two, for it has two attentions
# Lists of layers that are passed in turn
_STACKS = {
    "blt": (
        "model.patcher.layers", "model.local_encoder.layers", "model.global_transformer.layers",
        "model.local_decoder.layers",
    ),
    "hrm_text": ("model.L_module.layers", "model.H_module.layers"),
}  # fmt: skip
_PASSED_AGAIN = {"hrm_text"}  # families that pass their lists several times, and count each passing as a layer


def model_from_config(config: PretrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the family's whole model, which the checkpoint's names are of."""
    is_image_text = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    family: Any = AutoModelForImageTextToText if is_image_text else AutoModelForCausalLM
    model: PreTrainedModel = family.from_config(config, dtype=dtype, trust_remote_code=False)
    return model


def is_composite(config: PretrainedConfig) -> bool:
    """Return whether a configuration has a text part beside others."""
    return type(config.get_text_config(decoder=True)) is not type(config)


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the one ModuleList that holds the decoder layers, with its name; of stacks, a list of all their layers."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _STACKS:
        parts: dict[str, Any] = dict(model.named_modules())  # BLT may have no model for patches
        stacks = [parts[name] for name in _STACKS[config.model_type] if name in parts]
        return "model.layers", nn.ModuleList(itertools.chain(*stacks))
    num_layers = config.num_layers if config.model_type in _TWO_IN_ONE else config.num_hidden_layers
    if num_layers < 1:
        raise CheckpointError(
            "E_CONFIG_INVALID", f"num_hidden_layers is {num_layers}.", "Download the model's config.json again."
        )
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and "." in name
    ]
    outermost = [item for item in found if not any(item[0].startswith(f"{other}.") for other, _ in found)]
    if len(outermost) > 1:  # a tower may have as many, or there are as many rotations
        decoder = set(model.get_decoder().modules())
        outermost = [item for item in outermost if item[1] in decoder and any(True for _ in item[1].parameters())]
        depths = [name.count(".") for name, _ in outermost]
        outermost = [item for item, depth in zip(outermost, depths, strict=True) if depth == min(depths)]
    if len(outermost) != 1:
        what = f"{type(model).__name__} has no single list of {num_layers} decoder layers."
        raise CheckpointError("E_UNSUPPORTED_ARCHITECTURE", what, _FIX)
    return outermost[0]


def passings(model: PreTrainedModel) -> float:
    """Return how often a pass runs a decoder layer, on average."""
    config = model.config.get_text_config(decoder=True)
    return config.num_hidden_layers / len(decoder_layers(model)[1]) if config.model_type in _PASSED_AGAIN else 1.0


def layer_by_name(model: PreTrainedModel) -> dict[str, int]:
    """Return the index of the decoder layer that each of its parameters and modules belongs to."""
    indices = {layer: index for index, layer in enumerate(decoder_layers(model)[1])}
    return {
        f"{path}.{name}": indices[module]
        for path, module in model.named_modules()
        if module in indices
        for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_modules())
    }


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the innermost model that has the decoder layers and the head: a model of words without its towers."""
    layers, head = decoder_layers(model)[1], model.get_output_embeddings()
    inner = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    with_both = [part for part in inner if {*layers, head} <= set(part.modules())]
    return min(with_both, key=lambda part: sum(1 for _ in part.modules()), default=model)


def unread_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters and stored buffers that words do not pass through."""
    if not is_composite(model.config):
        return frozenset()
    decoder = f"{decoder_layers(model)[0].rpartition('.')[0]}."
    try:
        found = (model.get_input_embeddings(), model.get_output_embeddings())
    except NotImplementedError as error:
        raise CheckpointError(
            "E_UNSUPPORTED_ARCHITECTURE", f"{type(model).__name__} names no table of words ({error}).", _FIX
        ) from error
    ends = [module for module in found if module is not None]
    own = {id(tensor) for module in ends for tensor in module.state_dict(keep_vars=True).values()}
    names = model.state_dict(keep_vars=True)
    return frozenset(name for name, tensor in names.items() if not name.startswith(decoder) and id(tensor) not in own)


def drop_parameters(model: PreTrainedModel, names: frozenset[str]) -> None:
    """Leave these parameters out of the model: its device and number format are then those of the others."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if attribute in module._parameters:
            module._parameters[attribute] = None
