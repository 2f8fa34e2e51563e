"""Short convolutions. Legend: n rows of all texts, m of one, r open rows (after the state), c channels, w taps."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from edgespec.model.mechanisms.recurrent import (
    NUM_ROW_COPIES,
    Plain,
    RecurrentFunction,
    convolution_of,
    of_texts,
    read_rows,
)
from edgespec.model.mechanisms.state_cache import OPEN_ROWS, Rows, StateRows, StateSizes
from edgespec.model.pass_rows import Span


def fold_inputs(state: Tensor, rows: Rows, count: int) -> tuple[Tensor, Rows]:
    """Return the last inputs before the remaining rows, as many as the state has, and these rows."""
    return torch.cat([state, rows[0][:count]])[count:], (rows[0][count:],)


def last_inputs(held: StateRows, new: Tensor, visible: Tensor) -> Tensor:
    """Return the inputs [m, taps, c] of each new row [m, c] and of those before it on its path, itself the last.

    The state has the inputs [taps - 1, c] before the rows after it.
    """
    width = held.state.shape[0] + 1
    inputs = torch.cat([held.state, *held.rows, new])
    # Ancestors lie in the order of their depth, so the last rows that a row sees are itself and those before it.
    sees = torch.cat([visible.new_ones(len(visible), width - 1), visible], 1)
    places = (sees * torch.arange(1, len(inputs) + 1, device=sees.device)).topk(width, 1).values - 1
    return inputs[places.flip(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A causal convolution of each channel. Its state is the last inputs [(w - 1) * dilation, c]; rows are inputs."""

    plain: Plain
    inputs: Tensor  # [m, c]
    weight: Tensor  # [c, w]
    bias: Tensor | None  # [c]
    activation: str | None
    dilation: int = 1

    fold = staticmethod(fold_inputs)
    rows_at_once = OPEN_ROWS

    def initial(self) -> Tensor:
        """Return zeros."""
        return self.inputs.new_zeros((self.weight.shape[1] - 1) * self.dilation, self.inputs.shape[1])

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the state and the rows that follow it."""
        inputs = torch.cat([state, self.inputs[:count]])
        out = self.plain(inputs.T[None], self.weight, self.bias, activation=self.activation)
        return out[0].T[state.shape[0] :], inputs[count:].clone()

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Gather the inputs of each row and of its ancestors."""
        new = self.inputs[first:]
        taps = last_inputs(held, new, visible)[:, :: self.dilation]  # [m, w, c]
        # One product after the other: a row has the same bits among any number of rows.
        weights = self.weight.float()
        parts = [taps[:, tap].float() * weights[:, tap] for tap in range(taps.shape[1])]
        out = functools.reduce(torch.add, parts if self.bias is None else [*parts, self.bias.float()])
        out = out.to(self.weight.dtype)
        out = out if self.activation is None else ACT2FN[self.activation](out)
        return out.to(new.dtype), (new,)


class ShortConvolution(RecurrentFunction):
    """The last inputs of a convolution of each channel."""

    function = "causal_conv1d_fn"

    @staticmethod
    def rows(
        plain: Plain,
        spans: Sequence[Span],
        hidden_states: Tensor,  # [1, c, n]
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the convolved rows [1, c, n]."""
        forms = [
            Convolution(plain=plain, inputs=part, weight=weight, bias=bias, activation=activation)
            for part in of_texts(spans, hidden_states.mT)
        ]
        return read_rows(spans, forms).mT

    def sizes(self, mixer: nn.Module, dtype: torch.dtype, *, num_inputs: int, keeps_row_bits: bool) -> StateSizes:
        """Return those of a mixer's convolution."""
        convolution = convolution_of(mixer)
        if convolution is None:
            return StateSizes()
        channels, _, width = convolution.weight.shape
        row_bytes = channels * dtype.itemsize
        num_before = (width - 1) * convolution.dilation[0]
        return StateSizes(
            state_bytes=num_before * row_bytes, row_bytes=row_bytes, work_bytes=NUM_ROW_COPIES * row_bytes
        )
