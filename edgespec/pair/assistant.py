"""A Gemma 4 assistant's folder is opened for a target: both are checked against each other before weights are read."""

from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from edgespec.draft.assistant_network import own_parts
from edgespec.draft.draft_kind import DraftKind
from edgespec.draft.gemma_assistant import AssistantFacts, check_tensors, lent_by, parameter_name, read_assistant
from edgespec.pair.folder import ModelFolder
from edgespec.pair.published import StatedDraft, check_ordering, draft_config, open_stated
from offload.checkpoint import Checkpoint


def open_assistant(folder: Path, target: ModelFolder, kind: DraftKind, checkpoint: Checkpoint) -> ModelFolder:
    """Return an assistant as the draft of this target; a checkpoint without tensors is planned from the config.

    Raises EdgespecError where it cannot be read, or is of another target.
    """
    facts, layer = read_gemma_assistant(folder, kind, checkpoint)
    text_config = target.config.get_text_config(decoder=True)
    facts.check_fits(text_config)
    lent = lent_by(text_config)
    numbers = " and ".join(str(layer + 1) for layer in sorted(lent[kind] for kind in facts.head_dims))
    stated = StatedDraft(
        facts=facts,
        layer=layer,
        parts=own_parts(facts, text_config),
        draft=facts.assistant,
        check_tensors=partial(check_tensors, facts, layer),
        check_ids=partial(check_ordering, facts.assistant, vocab=facts.vocab_size),
        parameter_name=partial(parameter_name, facts=facts),
        description=f"is a Gemma 4 assistant, which reads what the target's layers {numbers} keep of the text",
    )
    return open_stated(folder, target, stated, checkpoint)


def read_gemma_assistant(folder: Path, _: DraftKind, __: Checkpoint) -> tuple[AssistantFacts, PretrainedConfig]:
    """Return an assistant's facts and its layers' config; raises EdgespecError where they are not understood."""
    return read_assistant(draft_config(folder), named=str(folder))
