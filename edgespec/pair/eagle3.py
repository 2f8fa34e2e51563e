"""An EAGLE-3 head's folder is opened for a target: both are checked against each other before any weight is read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from edgespec.draft.eagle3 import Eagle3Facts, parameter_name, read_eagle3
from edgespec.draft.eagle3_network import own_parts
from edgespec.draft.form import INSTEAD, DraftForm
from edgespec.draft.own_parts import OwnParts
from edgespec.errors import EdgespecError, offload_errors
from edgespec.pair.folder import ModelFolder, read_json
from offload.checkpoint import Checkpoint, TensorEntry
from offload.skeleton import build_on_meta, lent_names, stored_buffers


def open_eagle3(folder: Path, target: ModelFolder, form: DraftForm, checkpoint: Checkpoint) -> ModelFolder:
    """Return a head as the draft of this target; a checkpoint without tensors is planned from the config.

    Raises EdgespecError where it cannot be read, or is of another target.
    """
    config = read_json(folder / "config.json")
    facts, layer = read_eagle3(config, checkpoint.tensors, form, named=str(folder))
    text_config = target.config.get_text_config(decoder=True)
    facts.check_fits(text_config)
    parts = own_parts(facts, facts.layers(int(text_config.num_hidden_layers)))
    with offload_errors():
        if checkpoint.tensors:
            _check_map(facts, checkpoint, vocab=int(text_config.vocab_size))
            checkpoint = _renamed(facts, layer, checkpoint)
        else:
            checkpoint = _planned(layer, parts, folder)
    return ModelFolder(
        folder=folder,
        config=layer,
        checkpoint=checkpoint,
        generation_config={},
        stated=config,
        parts=parts,
        own_notes=facts.notes,
    )


def _renamed(facts: Eagle3Facts, layer: PretrainedConfig, checkpoint: Checkpoint) -> Checkpoint:
    """Return the tensors under their parameters' names; their own stay for messages."""
    tensors: dict[str, TensorEntry] = {}
    for stored, entry in checkpoint.tensors.items():
        name = parameter_name(stored, facts, num_layers=int(layer.num_hidden_layers))
        if name is not None and name in tensors:
            what = f"the EAGLE-3 head '{facts.named}' has '{stored}' and '{tensors[name].name}', which are one weight."
            raise EdgespecError("E_DRAFT_FORM", what, f"{INSTEAD}.")
        if name is not None:
            tensors[name] = entry
    return replace(checkpoint, tensors=tensors)


def _check_map(facts: Eagle3Facts, checkpoint: Checkpoint, *, vocab: int) -> None:
    """Raise EdgespecError where the map of the head's tokens leads out of the target's, or to one twice."""
    if not facts.has_map:
        return
    entry = next(entry for name, entry in checkpoint.tensors.items() if name.removeprefix("model.") == "d2t")
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        offsets = torch.frombuffer(bytearray(file.read(entry.num_bytes)), dtype=entry.dtype)
    ids = torch.arange(offsets.shape[0]) + offsets
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().shape[0] < ids.shape[0]):
        raise EdgespecError(
            "E_DRAFT_FORM",
            f"'d2t' of the EAGLE-3 head '{facts.named}' leads out of the target's {vocab} tokens, or to one twice: it "
            "holds what is added to a token's own number, and no ids.",
            "Convert the head again, or download it again.",
        )


def _planned(layer: PretrainedConfig, parts: OwnParts, folder: Path) -> Checkpoint:
    """Return the tensors that a head of this config would have."""
    dtype = layer.dtype if isinstance(layer.dtype, torch.dtype) else torch.bfloat16
    model = build_on_meta(layer, folder, dtype=dtype)
    parts.attach(model)
    lent = lent_names(model, parts.modules)
    own = {**dict(model.named_parameters()), **stored_buffers(model)}
    return Checkpoint(
        folder=folder,
        tensors={
            name: TensorEntry.planned(name, tuple(tensor.shape), tensor.dtype)
            for name, tensor in own.items()
            if name not in lent
        },
    )


def num_parameters(checkpoint: Checkpoint) -> int:
    """Return the number of a head's own weights."""
    return sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
