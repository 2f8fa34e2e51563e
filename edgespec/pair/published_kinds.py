"""Each kind of published draft is opened for a target: they are checked against each other before weights are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from edgespec.draft import assistant_network, dflash, dflash_network, eagle3, eagle3_network, gemma_assistant
from edgespec.draft.dflash import DFlashFacts
from edgespec.draft.draft_kind import BLOCKS, DraftKind
from edgespec.draft.eagle3 import Eagle3Facts
from edgespec.draft.gemma_assistant import AssistantFacts
from edgespec.pair.folder import ModelFolder
from edgespec.pair.published import StatedDraft, as_published, check_map, check_ordering, draft_config, open_stated
from offload.checkpoint import Checkpoint

PUBLISHED = {"eagle3", "assistant", *BLOCKS}  # kinds
Facts = Eagle3Facts | DFlashFacts | AssistantFacts


def open_published(folder: Path, target: ModelFolder, kind: DraftKind, checkpoint: Checkpoint) -> ModelFolder:
    """Return a head, a drafter or an assistant as the draft of this target.

    A checkpoint without tensors is planned from the config. Raises EdgespecError where the draft cannot be read, or is
    of another target.
    """
    facts, layer = read_published(folder, kind, checkpoint)
    text_config = target.config.get_text_config(decoder=True)
    facts.check_fits(text_config)
    match facts:
        case Eagle3Facts():
            stated = _head(facts, layer, text_config)
        case DFlashFacts():
            stated = _drafter_of_blocks(facts, layer, text_config)
        case AssistantFacts():
            stated = _assistant(facts, layer, text_config)
    return open_stated(folder, target, stated, checkpoint)


def read_published(folder: Path, kind: DraftKind, checkpoint: Checkpoint) -> tuple[Facts, PretrainedConfig]:
    """Return a draft's facts and its layers' config; raises EdgespecError where they are not understood."""
    config = draft_config(folder)
    if kind.name == "assistant":
        return gemma_assistant.read_assistant(config, named=str(folder))
    read = eagle3.read_eagle3 if kind.name == "eagle3" else dflash.read_dflash
    return read(config, as_published(checkpoint), kind, named=str(folder))


def _head(facts: Eagle3Facts, layer: PretrainedConfig, target: PretrainedConfig) -> StatedDraft:
    layers = facts.layers(int(target.num_hidden_layers))
    states = f"hidden states after {', '.join(map(str, layers))} layers" if layers else "last hidden states"
    return StatedDraft(
        facts=facts,
        layer=layer,
        parts=eagle3_network.own_parts(facts, layers),
        draft=eagle3.eagle3_head(facts.named),
        check_tensors=partial(eagle3.check_tensors, facts, layer),
        check_ids=partial(check_map, facts, vocab=int(target.vocab_size)),
        parameter_name=partial(eagle3.parameter_name, facts=facts, num_layers=int(layer.num_hidden_layers)),
        description=f"is an EAGLE-3 head, which reads the target's {states}",
    )


def _drafter_of_blocks(facts: DFlashFacts, layer: PretrainedConfig, target: PretrainedConfig) -> StatedDraft:
    layers = facts.layers(int(target.num_hidden_layers))
    states = f"the target's states after {', '.join(map(str, layers))} layers"
    return StatedDraft(
        facts=facts,
        layer=layer,
        parts=dflash_network.own_parts(facts, layers),
        draft=facts.drafter,
        check_tensors=partial(dflash.check_tensors, facts, layer, num_states=len(layers)),
        check_ids=partial(check_map, facts, vocab=int(target.vocab_size)),
        parameter_name=partial(dflash.parameter_name, facts=facts),
        description=f"is a {facts.drafter.kind}, which guesses {facts.num_slots} tokens from {states}",
    )


def _assistant(facts: AssistantFacts, layer: PretrainedConfig, target: PretrainedConfig) -> StatedDraft:
    lent = gemma_assistant.lent_by(target)
    numbers = " and ".join(str(layer + 1) for layer in sorted(lent[kind] for kind in facts.head_dims))
    return StatedDraft(
        facts=facts,
        layer=layer,
        parts=assistant_network.own_parts(facts, target),
        draft=facts.assistant,
        check_tensors=partial(gemma_assistant.check_tensors, facts, layer),
        check_ids=partial(check_ordering, facts.assistant, vocab=facts.vocab_size),
        parameter_name=partial(gemma_assistant.parameter_name, facts=facts),
        description=f"is a Gemma 4 assistant, which reads what the target's layers {numbers} keep of the text",
    )
