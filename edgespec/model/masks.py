"""Attention masks in the form that a family takes.

They are additive floats, because eager attention adds the mask to the scores: a bool mask would add 1. The
sliding window is applied on positions, because rows of a tree are not in the order of their positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig


class MaskForm:
    """The form of a family's masks: windowed or not, and one mask or one for each kind of layer."""

    def __init__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        kinds = getattr(config, "layer_types", None) or []
        window = getattr(config, "sliding_window", None)
        self._dtype = dtype
        self._device = device
        # Families with layer_types apply the window in those layers only and take a mask per kind;
        # the others (Mistral, Phi-3) apply it in every layer and take one mask.
        self._is_per_kind = "sliding_attention" in kinds
        self._window: int | None = window if self._is_per_kind or not kinds else None
        # Stand for the masks of a text that passes the layers in chunks; known by identity.
        self._full_stand_in = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
        self._sliding_stand_in = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)

    def tree(self, visible: Tensor, tail_positions: Tensor, *, num_before: int) -> Any:
        """Return masks [1, 1, n, keys] for rows that all see the first `num_before` keys.

        Of the `tail` keys after those each row sees what `visible` [n, tail] says. `tail_positions` [tail] are
        the positions of those keys, and the rows are the last n of them.
        """
        num_rows, tail = visible.shape
        full = torch.zeros(num_rows, num_before + tail, dtype=self._dtype, device=self._device)
        hidden = torch.finfo(self._dtype).min
        full[:, num_before:].masked_fill_(~visible, hidden)
        if self._window is None:
            return full[None, None]
        key_positions = torch.cat([torch.arange(num_before, device=self._device), tail_positions])
        out_of_window = tail_positions[-num_rows:, None] - key_positions[None, :] >= self._window
        sliding = full.masked_fill(out_of_window, hidden)[None, None]
        return self._form(full[None, None], sliding)

    def stand_ins(self) -> Any:
        """Return what a model is given in place of masks that each layer gets in chunks."""
        return self._form(self._full_stand_in, self._sliding_stand_in)

    def of_stand_in(self, value: object, start: int, end: int) -> Tensor | None:
        """Return the mask of text rows [start, end) over keys [0, end) that a stand-in stands for.

        It is None where the value is no stand-in.
        """
        if value is not self._full_stand_in and value is not self._sliding_stand_in:
            return None
        keys = torch.arange(end, device=self._device)
        rows = keys[start:, None]
        is_hidden = keys > rows
        if value is self._sliding_stand_in:
            assert self._window is not None
            is_hidden |= rows - keys >= self._window
        mask = torch.zeros(end - start, end, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(is_hidden, torch.finfo(self._dtype).min)[None, None]

    def _form(self, full: Tensor, sliding: Tensor) -> Any:
        if self._is_per_kind:
            return {"full_attention": full, "sliding_attention": sliding}
        return full if self._window is None else sliding
