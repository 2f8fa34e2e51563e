"""A DFlash drafter's folder is opened for a target: both are checked against each other before any weight is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from edgespec.draft.dflash import DFlashFacts, check_tensors, parameter_name, read_dflash
from edgespec.draft.dflash_network import own_parts
from edgespec.draft.draft_kind import DraftKind
from edgespec.pair.folder import ModelFolder
from edgespec.pair.published import StatedDraft, as_published, check_map, draft_config, open_stated
from offload.checkpoint import Checkpoint


def open_dflash(folder: Path, target: ModelFolder, kind: DraftKind, checkpoint: Checkpoint) -> ModelFolder:
    """Return a drafter as the draft of this target; a checkpoint without tensors is planned from the config.

    Raises EdgespecError where it cannot be read, or is of another target.
    """
    facts, layer = read_dflash_drafter(folder, kind, checkpoint)
    text_config = target.config.get_text_config(decoder=True)
    facts.check_fits(text_config)
    layers = facts.layers(int(text_config.num_hidden_layers))
    numbers = ", ".join(map(str, layers))
    guesses = f"guesses {facts.num_slots} tokens from the target's states after {numbers} layers"
    stated = StatedDraft(
        facts=facts,
        layer=layer,
        parts=own_parts(facts, layers),
        draft=facts.drafter,
        check_tensors=partial(check_tensors, facts, layer, num_states=len(layers)),
        check_ids=partial(check_map, facts, vocab=int(text_config.vocab_size)),
        parameter_name=partial(parameter_name, facts=facts),
        description=f"is a {facts.drafter.kind}, which {guesses}",
    )
    return open_stated(folder, target, stated, checkpoint)


def read_dflash_drafter(folder: Path, kind: DraftKind, checkpoint: Checkpoint) -> tuple[DFlashFacts, PretrainedConfig]:
    """Return a drafter's facts and its layers' config; raises EdgespecError where they are not understood."""
    return read_dflash(draft_config(folder), as_published(checkpoint), kind, named=str(folder))
