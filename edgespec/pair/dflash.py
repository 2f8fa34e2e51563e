"""A DFlash drafter's folder is opened for a target: both are checked against each other before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from edgespec.draft.dflash import DFlashFacts, check_tensors, parameter_name, read_dflash, unknown_tensor, wrong
from edgespec.draft.dflash_network import own_parts
from edgespec.draft.form import DraftForm
from edgespec.errors import offload_errors
from edgespec.pair.eagle3 import check_map, note_of_target
from edgespec.pair.folder import ModelFolder, read_json
from edgespec.pair.planned_parts import planned_parts
from offload.checkpoint import Checkpoint, TensorEntry


def open_dflash(folder: Path, target: ModelFolder, form: DraftForm, checkpoint: Checkpoint) -> ModelFolder:
    """Return a drafter as the draft of this target; a checkpoint without tensors is planned from the config.

    Raises EdgespecError where it cannot be read, or is of another target.
    """
    facts, layer = read_dflash_drafter(folder, form, checkpoint)
    text_config = target.config.get_text_config(decoder=True)
    facts.check_fits(text_config)
    layers = facts.layers(int(text_config.num_hidden_layers))
    parts = own_parts(facts, layers)
    with offload_errors():
        planned = planned_parts(layer, parts, folder)
        if checkpoint.tensors:
            check_tensors(facts, layer, checkpoint.tensors, len(layers))
            check_map(facts, checkpoint, vocab=int(text_config.vocab_size))
            checkpoint = _renamed(facts, checkpoint, known=planned)
        else:
            checkpoint = planned
    numbers = ", ".join(map(str, layers))
    what = (
        f"is a DFlash drafter, which guesses {facts.num_slots} tokens from the target's states after {numbers} layers"
    )
    return ModelFolder(
        folder=folder,
        config=layer,
        checkpoint=checkpoint,
        generation_config={},
        stated=read_json(folder / "config.json"),
        parts=parts,
        own_notes=(what, *facts.notes, *note_of_target(facts.verifier, target)),
    )


def read_dflash_drafter(folder: Path, form: DraftForm, checkpoint: Checkpoint) -> tuple[DFlashFacts, PretrainedConfig]:
    """Return a drafter's facts and its layers' config; raises EdgespecError where they are not understood."""
    return read_dflash(read_json(folder / "config.json"), checkpoint.tensors, form, named=str(folder))


def _renamed(facts: DFlashFacts, checkpoint: Checkpoint, *, known: Checkpoint) -> Checkpoint:
    """Return the tensors under their parameters' names, which are `known`; their own stay for messages."""
    tensors: dict[str, TensorEntry] = {}
    for stored, entry in checkpoint.tensors.items():
        name = parameter_name(stored, facts)
        if name is None:
            continue
        if name not in known.tensors:
            raise unknown_tensor(facts, stored)
        if name in tensors:
            raise wrong(facts.named, f"has '{stored}' and '{tensors[name].name}', which are one weight")
        tensors[name] = entry
    return replace(checkpoint, tensors=tensors)
