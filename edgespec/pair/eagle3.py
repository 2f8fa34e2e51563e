"""An EAGLE-3 head's folder is opened for a target: both are checked against each other before any weight is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from edgespec.draft.draft_kind import DraftKind
from edgespec.draft.eagle3 import Eagle3Facts, check_tensors, eagle3_head, parameter_name, read_eagle3
from edgespec.draft.eagle3_network import own_parts
from edgespec.pair.folder import ModelFolder
from edgespec.pair.published import StatedDraft, as_published, check_map, draft_config, open_stated
from offload.checkpoint import Checkpoint


def open_eagle3(folder: Path, target: ModelFolder, kind: DraftKind, checkpoint: Checkpoint) -> ModelFolder:
    """Return a head as the draft of this target; a checkpoint without tensors is planned from the config.

    Raises EdgespecError where it cannot be read, or is of another target.
    """
    facts, layer = read_eagle3_head(folder, kind, checkpoint)
    text_config = target.config.get_text_config(decoder=True)
    facts.check_fits(text_config)
    layers = facts.layers(int(text_config.num_hidden_layers))
    stated = StatedDraft(
        facts=facts,
        layer=layer,
        parts=own_parts(facts, layers),
        draft=eagle3_head(facts.named),
        check_tensors=partial(check_tensors, facts, layer),
        check_ids=partial(check_map, facts, vocab=int(text_config.vocab_size)),
        parameter_name=partial(parameter_name, facts=facts, num_layers=int(layer.num_hidden_layers)),
        description=_description(layers),
    )
    return open_stated(folder, target, stated, checkpoint)


def read_eagle3_head(folder: Path, kind: DraftKind, checkpoint: Checkpoint) -> tuple[Eagle3Facts, PretrainedConfig]:
    """Return a head's facts and its layer's config; raises EdgespecError where they are not understood."""
    return read_eagle3(draft_config(folder), as_published(checkpoint), kind, named=str(folder))


def _description(layers: tuple[int, ...]) -> str:
    """Return in words what the head is, and what it reads."""
    if not layers:
        return "is an EAGLE-3 head, which reads the target's last hidden states"
    numbers = ", ".join(map(str, layers))
    return f"is an EAGLE-3 head, which reads the target's hidden states after {numbers} layers"
