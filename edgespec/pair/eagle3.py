"""An EAGLE-3 head's folder is opened for a target: both are checked against each other before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from edgespec.draft.eagle3 import Eagle3Facts, check_tensors, parameter_name, read_eagle3, unknown_tensor
from edgespec.draft.eagle3_network import OutputFacts, own_parts
from edgespec.draft.form import INSTEAD, DraftForm
from edgespec.errors import EdgespecError, offload_errors
from edgespec.pair.folder import ModelFolder, read_json
from edgespec.pair.planned_parts import planned_parts
from offload.checkpoint import Checkpoint, TensorEntry


def open_eagle3(folder: Path, target: ModelFolder, form: DraftForm, checkpoint: Checkpoint) -> ModelFolder:
    """Return a head as the draft of this target; a checkpoint without tensors is planned from the config.

    Raises EdgespecError where it cannot be read, or is of another target.
    """
    facts, layer = read_eagle3_head(folder, form, checkpoint)
    text_config = target.config.get_text_config(decoder=True)
    facts.check_fits(text_config)
    layers = facts.layers(int(text_config.num_hidden_layers))
    parts = own_parts(facts, layers)
    with offload_errors():
        if checkpoint.tensors:
            check_tensors(facts, layer, checkpoint.tensors)
            check_map(facts, checkpoint, vocab=int(text_config.vocab_size))
            checkpoint = _renamed(facts, layer, checkpoint, known=planned_parts(layer, parts, folder))
        else:
            checkpoint = planned_parts(layer, parts, folder)
    return ModelFolder(
        folder=folder,
        config=layer,
        checkpoint=checkpoint,
        generation_config={},
        stated=read_json(folder / "config.json"),
        parts=parts,
        own_notes=(_description(layers), *facts.notes, *note_of_target(facts.verifier, target)),
    )


def read_eagle3_head(folder: Path, form: DraftForm, checkpoint: Checkpoint) -> tuple[Eagle3Facts, PretrainedConfig]:
    """Return a head's facts and its layer's config; raises EdgespecError where they are not understood."""
    return read_eagle3(read_json(folder / "config.json"), checkpoint.tensors, form, named=str(folder))


def _description(layers: tuple[int, ...]) -> str:
    """Return in words what the head is, and what it reads."""
    if not layers:
        return "is an EAGLE-3 head, which reads the target's last hidden states"
    numbers = ", ".join(map(str, layers))
    return f"is an EAGLE-3 head, which reads the target's hidden states after {numbers} layers"


def note_of_target(verifier: str | None, target: ModelFolder) -> tuple[str, ...]:
    """Return what is to be said where the head's makers name another target than this."""
    repository = target.folder.parent.parent.name  # of a snapshot in the Hugging Face cache: models--OWNER--NAME
    names = {target.folder.name, repository.rpartition("--")[2]}
    if verifier is None or verifier.rstrip("/").rpartition("/")[2] in names:
        return ()
    return (f"was made for '{verifier}', as it says: of another target it may draft badly",)


def _renamed(facts: Eagle3Facts, layer: PretrainedConfig, checkpoint: Checkpoint, *, known: Checkpoint) -> Checkpoint:
    """Return the tensors under their parameters' names, which are `known`; their own stay for messages."""
    tensors: dict[str, TensorEntry] = {}
    for stored, entry in checkpoint.tensors.items():
        name = parameter_name(stored, facts, num_layers=int(layer.num_hidden_layers))
        if name is not None and name not in known.tensors:
            raise unknown_tensor(facts, stored)
        if name is not None and name in tensors:
            what = f"the EAGLE-3 head '{facts.named}' has '{stored}' and '{tensors[name].name}', which are one weight."
            raise EdgespecError("E_DRAFT_FORM", what, f"{INSTEAD}.")
        if name is not None:
            tensors[name] = entry
    return replace(checkpoint, tensors=tensors)


def check_map(facts: OutputFacts, checkpoint: Checkpoint, *, vocab: int) -> None:
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
            f"'d2t' of '{facts.named}' leads out of the target's {vocab} tokens, or to one twice: it "
            "holds what is added to a token's own number, and no ids.",
            "Convert the head again, or download it again.",
        )
