"""A feature head that can be trained: made, written and read again.

The head borrows embedding, final norm and language model head from a target without its layers. Trained numbers are
float32, whatever the target's are. `new_draft` makes a network of any form that reads a target's hidden states.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.draft.head_network import HEAD_KEY, OWN_MODULES, HeadFacts, attach_head_parts, head_config
from edgespec.draft.own_parts import OwnParts, lend
from edgespec.errors import EdgespecError, offload_errors
from edgespec.pair.folder import ModelFolder
from edgespec.user_paths import written_whole
from offload.placement import all_resident
from offload.skeleton import build_on_meta, lent_names
from offload.streamed_model import StreamedModel


@contextmanager
def lender(target: ModelFolder, *, device: torch.device, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """Load the target without its decoder layers: heads borrow the rest."""
    with offload_errors():
        skeleton = target.skeleton(target.checkpoint, dtype=dtype)
        streamed = StreamedModel(dataclasses.replace(skeleton, records=()), all_resident(0), device=device, lends=True)
    try:
        yield streamed.model
    finally:
        streamed.close()


def new_head(target: PreTrainedModel, facts: HeadFacts, *, seed: int) -> PreTrainedModel:
    """Make a head with fresh weights in float32, on the target's device; the borrowed weights are frozen."""
    parts = OwnParts(attach=functools.partial(attach_head_parts, facts=facts), modules=OWN_MODULES)
    return new_draft(target, head_config(target.config), parts, named=facts.target, seed=seed)


def new_draft(
    target: PreTrainedModel, config: PretrainedConfig, parts: OwnParts, *, named: str, seed: int
) -> PreTrainedModel:
    """Make a draft of this config and these parts, as `new_head` does; `named` is for errors."""
    model = build_on_meta(config, named, dtype=torch.float32)
    parts.attach(model)
    lent = lent_names(model, parts.modules)
    lend(target, model, lent)
    device = target.get_input_embeddings().weight.device
    assert isinstance(device, torch.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            names = [name for name, _ in module.named_parameters(recurse=False)]
            if not names or not all(parameter.is_meta for parameter in module.parameters(recurse=False)):
                continue
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # those within it have their turn
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in lent)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    return model


def own_tensors(model: PreTrainedModel, modules: tuple[str, ...] = OWN_MODULES) -> dict[str, Tensor]:
    """Return a draft's own parameters by name, which are trained and saved; `modules` are its own beside its layers."""
    lent = lent_names(model, modules)
    return {name: parameter for name, parameter in model.named_parameters() if name not in lent}


def save_head(model: PreTrainedModel, facts: HeadFacts, folder: Path) -> None:
    """Write the head's folder; raises EdgespecError where it cannot be written."""
    config = json.loads(model.config.to_json_string(use_diff=False)) | {HEAD_KEY: dataclasses.asdict(facts)}
    config.pop("_name_or_path", None)  # the target's path is private
    write_draft(folder, config, own_tensors(model))


def write_draft(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a draft's folder, each file whole or not at all; raises EdgespecError where it cannot be written."""
    stored = {
        name: (tensor.detach().float() if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The weights take their name first: a config.json says that there is a head.
        with (
            written_whole(folder / "config.json", is_private=False) as text,
            written_whole(folder / "model.safetensors", is_private=False) as weights,
        ):
            save_file(stored, weights)
            text.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise EdgespecError("E_OUTPUT", f"'{folder}' cannot be written ({error}).", "Choose another folder.") from error


def load_head(
    target: PreTrainedModel, folder: Path, facts: HeadFacts, *, fresh: tuple[str, ...] = ()
) -> PreTrainedModel:
    """Load a saved head for training; parameters that the files lack, or that begin with `fresh`, get new weights."""
    model = new_head(target, facts, seed=0)
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in own_tensors(model).items():
            if name in stored and not name.startswith(fresh):
                tensor.copy_(stored[name])
    return model
