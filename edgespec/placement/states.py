"""The memory of recurrent layers, in bytes, from the shapes of their mixers: states, rows beside them, temporaries.

Mixers that are read level by level are asked: they read rows without numbers, on the meta device.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from edgespec.model.layer_kinds import keeps_state, reads_by_levels
from edgespec.model.mechanisms.by_depth import FOLLOWING_ROWS, Mixer
from edgespec.model.mechanisms.state_cache import OPEN_ROWS
from edgespec.model.supported import understanding
from offload.text_part import decoder_layers

FLOAT32_BYTES, FLOAT64_BYTES = 4, 8
NUM_STATES = 2  # of a text: its own, and that of the prompt that was read last, or of the one that is being read
NUM_ROW_COPIES = 6  # of a row's inputs, keys and values while they pass a mixer
NUM_LEVEL_COPIES = 5  # of states while the rows of one depth, or those of a text, pass a mixer by its own code
NUM_PAIR_COPIES = 4  # of what two rows of a tree have in common for each head


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """The bytes that recurrent layers take."""

    state_bytes: int = 0  # of all layers' states of a text
    row_bytes: int = 0  # of a row beside all states
    work_bytes: int = 0  # of a row's temporaries in the widest layer
    pair_bytes: int = 0  # of two rows' temporaries in the widest layer
    level_bytes: int = 0  # of a row's states in the widest layer, where layers are read level by level

    def texts_bytes(self, *, num_texts: int, rows: int) -> int:
        """Return the bytes of texts under way, each with so many rows of a tree."""
        return num_texts * (NUM_STATES * self.state_bytes + (rows + 2 * OPEN_ROWS) * self.row_bytes)

    def pass_bytes(self, *, chunk_rows: int, rows: int) -> int:
        """Return the bytes of the temporaries of a chunk of rows, each of which sees `rows`."""
        return chunk_rows * (self.work_bytes + rows * self.pair_bytes) + max(rows, FOLLOWING_ROWS) * self.level_bytes


def state_sizes(model: PreTrainedModel, dtype: torch.dtype, *, keeps_row_bits: bool = False) -> StateSizes:
    """Return the sizes of a model's recurrent layers, which need have no weights; zeros where it has none.

    With `keeps_row_bits` known memories are computed in float64.
    """
    config = model.config.get_text_config(decoder=True)
    modules = [module for module in decoder_layers(model)[1].modules() if hasattr(module, "layer_idx")]
    if reads_by_levels(config):
        with understanding(model.config), torch.no_grad():
            mixers = [_level_sizes(mixer, config.hidden_size, dtype) for mixer in modules if keeps_state(type(mixer))]
    else:
        mixers = [_sizes(module, dtype, keeps_row_bits=keeps_row_bits) for module in modules]
    return StateSizes(
        state_bytes=sum(sizes.state_bytes for sizes in mixers),
        row_bytes=sum(sizes.row_bytes for sizes in mixers),
        work_bytes=max((sizes.work_bytes for sizes in mixers), default=0),
        pair_bytes=max((sizes.pair_bytes for sizes in mixers), default=0),
        level_bytes=max((sizes.level_bytes for sizes in mixers), default=0),
    )


def _level_sizes(mixer: nn.Module, num_inputs: int, dtype: torch.dtype) -> StateSizes:
    """Return the sizes of a mixer that is read level by level."""
    bare = copy.deepcopy(mixer).to("meta", torch.float32)
    state_bytes = Mixer(bare).num_state_numbers(num_inputs) * FLOAT32_BYTES
    row_bytes = num_inputs * dtype.itemsize
    return StateSizes(
        state_bytes=state_bytes,
        row_bytes=row_bytes,
        work_bytes=NUM_ROW_COPIES * row_bytes,
        level_bytes=NUM_LEVEL_COPIES * state_bytes,
    )


def _sizes(mixer: nn.Module, dtype: torch.dtype, *, keeps_row_bits: bool) -> StateSizes:
    """Return the sizes of one mixer; zeros where it is none."""
    convolution = getattr(mixer, "conv1d", None) or getattr(mixer, "conv", None)
    if not isinstance(convolution, nn.Conv1d):
        return StateSizes()
    channels, _, width = convolution.weight.shape
    groups, key_width, heads, value_width = _memory_shape(mixer)
    item = dtype.itemsize
    wide, written = (FLOAT64_BYTES, FLOAT64_BYTES) if keeps_row_bits else (FLOAT32_BYTES, item)
    num_before = (width - 1) * convolution.dilation[0]
    return StateSizes(
        state_bytes=num_before * channels * item + heads * key_width * value_width * wide,
        row_bytes=(channels + groups * key_width) * item + heads * (value_width * written + wide),
        work_bytes=NUM_ROW_COPIES * (channels * item + heads * (key_width + value_width) * wide),
        pair_bytes=NUM_PAIR_COPIES * heads * wide,
    )


def _memory_shape(mixer: nn.Module) -> tuple[int, int, int, int]:
    """Return the groups of keys, a key's width, the heads, and a head's width; zeros without a memory."""
    names = next((names for names in _SHAPES if all(hasattr(mixer, name) for name in names)), ())
    groups, key_width, heads, value_width = (int(getattr(mixer, name)) for name in names) if names else (0, 0, 0, 0)
    return groups, key_width, heads, value_width


_SHAPES = (
    # Gated delta rule. The oldest transformers we run with repeats a group's key for each of its heads.
    ("num_v_heads", "head_k_dim", "num_v_heads", "head_v_dim"),
    ("n_groups", "ssm_state_size", "num_heads", "head_dim"),  # Mamba 2
)
