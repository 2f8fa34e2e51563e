"""The ways in which a published draft can be read, against what its folder states.

Nothing in a folder proves which hidden states a draft was trained on, where a norm stands, or which of two inputs comes
first: what is wrong there gives no error, and fewer accepted tokens. Which readings make sense depends on the form.
Legend: L the target's layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from edgespec.draft.mtp import MtpFuse
from edgespec.draft.own_parts import aux_states_of
from edgespec.model.aux_states import AuxStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A way to read a draft, against what its folder states."""

    shift: int = 0  # layers later that the hidden states are taken
    before_norm: bool = False  # the hidden state of a multi-token-prediction layer has not passed the last norm
    flips_residual: bool = False  # norm_before_residual is the other way round
    flips_output: bool = False  # whether what is recycled has passed the draft's norm is the other way round
    swaps_inputs: bool = False  # the feature comes first, and the embedding second
    flips_anchor: bool = False  # whether a block's first row, the text's last token, guesses is the other way round


AS_STATED = Reading()
SHIFTS = (Reading(shift=1), Reading(shift=-1))
OF_HEADS = (AS_STATED, *SHIFTS, Reading(flips_residual=True), Reading(swaps_inputs=True))
OF_LAYERS = (AS_STATED, Reading(before_norm=True), Reading(swaps_inputs=True))
OF_BLOCKS = (AS_STATED, *SHIFTS, Reading(flips_anchor=True))
MOST_READINGS = len(OF_HEADS)


class NormedHead(nn.Module):
    """A language model head that norms its inputs first."""

    def __init__(self, norm: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    @property
    def weight(self) -> Tensor:
        """The weight [V, h] of the logits."""
        weight = self.linear.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of outputs [..., h]."""
        found: Tensor = self.linear(self.norm(hidden))
        return found


def readings_of(draft: PreTrainedModel, *, num_layers: int) -> tuple[Reading, ...]:
    """Return the readings of a draft whose target has so many layers, as far as they change what is guessed first."""
    aux_states = aux_states_of(draft)
    readings: Sequence[Reading] = OF_LAYERS if aux_states is None else OF_HEADS
    readings = OF_BLOCKS if hasattr(draft, "block") else readings
    layers = () if aux_states is None else aux_states.layers
    readings = [reading for reading in readings if not reading.flips_anchor or _has_places_flipped(draft)]
    return tuple(reading for reading in readings if all(0 <= layer + reading.shift <= num_layers for layer in layers))


def _has_places_flipped(draft: Any) -> bool:
    """Return whether a block guesses anything where its first row does not guess, or does, the other way round."""
    return int(draft.block.size) > 1 - int(draft.block.first_slot)


def recycles(draft: PreTrainedModel) -> bool:
    """Return whether a draft reads its own output below a tree's root."""
    return not hasattr(draft, "block")


def has_depths(draft: PreTrainedModel) -> bool:
    """Return whether a draft guesses more than the next token: a block may have one place alone."""
    block = getattr(draft, "block", None)
    return block is None or int(block.num_places) > 1


def apply_reading(draft: Any, reading: Reading, *, num_layers: int) -> None:
    """Let a draft of a target of so many layers be read so; what is flipped is flipped back by the same reading."""
    first, aux_states = draft.model.layers[0], aux_states_of(draft)
    if reading.flips_anchor:
        draft.block = replace(draft.block, first_slot=1 - draft.block.first_slot)
    if reading.flips_residual:
        first.norm_before_residual = not first.norm_before_residual
    if reading.swaps_inputs:
        of_order = draft.fuse if isinstance(draft.fuse, MtpFuse) else first
        of_order.has_feature_first = not of_order.has_feature_first
    if reading.flips_output:
        _flip_output(draft)
    if reading.before_norm:
        # Taken behind the last layer, states have not passed the norm.
        draft.fuse.aux_states = (
            AuxStates(layers=(num_layers,), make=lambda states: states) if aux_states is None else None
        )
    elif reading.shift and aux_states is not None:
        draft.fuse.aux_states = AuxStates(
            layers=tuple(layer + reading.shift for layer in aux_states.layers), make=aux_states.make
        )


def _flip_output(draft: Any) -> None:
    decoder, output = draft.model, draft.lm_head
    if isinstance(output, NormedHead):
        decoder.norm, draft.lm_head = output.norm, output.linear
    elif isinstance(draft.fuse, MtpFuse):
        draft.lm_head, decoder.norm = NormedHead(decoder.norm, output), nn.Identity()
    else:
        decoder.norm, output.norm = output.norm, decoder.norm


@contextmanager
def read_as(draft: PreTrainedModel, reading: Reading, *, num_layers: int) -> Iterator[None]:
    """Read a draft so for a while."""
    apply_reading(draft, reading, num_layers=num_layers)
    try:
        yield
    finally:
        apply_reading(draft, replace(reading, shift=-reading.shift), num_layers=num_layers)
