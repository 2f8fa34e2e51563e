"""What a draft that reads a target's hidden states has of its own, and how it borrows the rest.

Such a draft is a transformers model of its layers' family, so that masks, positions and caches are those of any model
here. `attach` puts its own modules into that model; what lies neither in the decoder layers nor in those is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from edgespec.draft.calls import BY_LAYER, DraftCalls
from edgespec.model.aux_states import AuxStates
from offload.text_part import decoder_layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnParts:
    """The modules of a draft beside its family's own."""

    attach: Callable[[PreTrainedModel], None]  # puts them into the model, on the meta device
    modules: tuple[str, ...]  # their names: whatever else is outside the layers, the target lends
    calls: DraftCalls = BY_LAYER
    copied_as: str | None = None  # of a copy of the target itself: the word for the format of its layers


def calls_of(parts: OwnParts | None) -> DraftCalls:
    """Return how a draft with these parts, or a language model, is called for a tree."""
    return BY_LAYER if parts is None else parts.calls


def is_copy(parts: OwnParts | None) -> bool:
    """Return whether a draft with these parts is a copy of its target."""
    return parts is not None and parts.copied_as is not None


def reads_features(draft: nn.Module) -> bool:
    """Return whether a draft reads a target's hidden states."""
    return hasattr(draft, "fuse")


def lent_layers(draft: nn.Module) -> Mapping[str, int]:
    """Return the target's layers whose keys and values a draft attends in place of its own, by their kind."""
    found: Mapping[str, int] = getattr(draft, "lent_layers", {})
    return found


def aux_states_of(draft: PreTrainedModel) -> AuxStates | None:
    """Return where a draft wants the target's hidden states to be taken; None: the last ones, as they are."""
    aux_states = getattr(draft.fuse, "aux_states", None) if reads_features(draft) else None
    return aux_states if isinstance(aux_states, AuxStates) else None


def has_readings(draft: PreTrainedModel) -> bool:
    """Return whether a draft is checked with its target, and read otherwise where it agrees better.

    These are all that are published; no heads of ours, which say what they are.
    """
    if not reads_features(draft):
        return False
    return aux_states_of(draft) is not None or hasattr(draft.fuse, "eh_proj")


def lend(target: PreTrainedModel, head: PreTrainedModel, names: Iterable[str]) -> None:
    """Put the target's own in the place of a head's parameters and stored buffers; nothing is copied."""
    ours = decoder_layers(head)[0].rpartition(".")[0]
    theirs = decoder_layers(target)[0].rpartition(".")[0]
    output = head.get_output_embeddings()
    # The ends of a model have one meaning in all families, and other names.
    ends = {
        head.get_input_embeddings(): target.get_input_embeddings(),
        getattr(output, "linear", output): target.get_output_embeddings(),
    }
    for name in names:
        source = f"{theirs}{name.removeprefix(ours)}" if name.startswith(f"{ours}.") else name
        path, _, attribute = name.rpartition(".")
        module = head.get_submodule(path)
        lender = ends[module] if module in ends else target.get_submodule(source.rpartition(".")[0])
        if attribute in module._buffers:
            module._buffers[attribute] = lender._buffers[attribute]
        else:
            module._parameters[attribute] = lender._parameters[attribute]
