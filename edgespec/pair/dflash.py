"""A DFlash drafter's folder is opened for a target: both are checked against each other before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from edgespec.draft.dflash import DFlashFacts, check_tensors, parameter_name, read_dflash
from edgespec.draft.dflash_network import own_parts
from edgespec.draft.draft_kind import DraftKind
from edgespec.errors import offload_errors
from edgespec.pair.folder import ModelFolder
from edgespec.pair.published import (
    as_published,
    check_map,
    draft_config,
    note_of_target,
    planned_parts,
    renamed,
    set_packing,
)
from offload.checkpoint import Checkpoint


def open_dflash(folder: Path, target: ModelFolder, kind: DraftKind, checkpoint: Checkpoint) -> ModelFolder:
    """Return a drafter as the draft of this target; a checkpoint without tensors is planned from the config.

    Raises EdgespecError where it cannot be read, or is of another target.
    """
    facts, layer = read_dflash_drafter(folder, kind, checkpoint)
    text_config = target.config.get_text_config(decoder=True)
    facts.check_fits(text_config)
    layers = facts.layers(int(text_config.num_hidden_layers))
    parts = own_parts(facts, layers)
    set_packing(layer, folder)
    with offload_errors():
        planned = planned_parts(layer, parts, folder)
        if checkpoint.tensors:
            check_tensors(facts, layer, as_published(checkpoint), len(layers))
            check_map(facts, checkpoint, vocab=int(text_config.vocab_size))
            name_of = partial(parameter_name, facts=facts)
            tensors = renamed(facts.drafter, checkpoint.tensors, name_of, known=planned.tensors)
            checkpoint = replace(checkpoint, tensors=tensors)
        else:
            checkpoint = planned
    numbers = ", ".join(map(str, layers))
    guesses = f"guesses {facts.num_slots} tokens from the target's states after {numbers} layers"
    return ModelFolder(
        folder=folder,
        config=layer,
        checkpoint=checkpoint,
        generation_config={},
        stated=draft_config(folder),
        parts=parts,
        own_notes=(
            f"is a {facts.drafter.kind}, which {guesses}",
            *facts.notes,
            *note_of_target(facts.verifier, target),
        ),
    )


def read_dflash_drafter(folder: Path, kind: DraftKind, checkpoint: Checkpoint) -> tuple[DFlashFacts, PretrainedConfig]:
    """Return a drafter's facts and its layers' config; raises EdgespecError where they are not understood."""
    return read_dflash(draft_config(folder), as_published(checkpoint), kind, named=str(folder))
