"""Short convolutions, the gated delta rule and Mamba 2 at the rows of one text, each in two forms.

Rows of a tree, and the last ones of a text, pass all at once beside the state, which stays. Rows of a long text take
transformers' own function (`plain`) from state to state. Legend: m rows, r rows behind the state, c channels, w taps,
g heads of keys, h heads of values, k and v their dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from edgespec.model.linear_memory import fold_memory, memory_of
from edgespec.model.state_cache import Fold, Rows, StateRows

Plain = Callable[..., Any]


class Form(Protocol):
    """A recurrent function at rows of one text."""

    @property
    def count(self) -> int:
        """The number of rows."""

    def initial(self) -> Tensor:
        """Return the state before a text."""

    @property
    def fold(self) -> Fold:
        """What takes the first rows behind a state into it."""

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [count, ...] of the first rows, each below the one before, and the state behind them."""

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Return the outputs [m - first, ...] of the rows from `first` on, and what is kept of them.

        `visible` [m - first, r + m - first] says which rows each of them sees: of those behind the state, and of them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A causal convolution of each channel. Its state is the last inputs [w - 1, c], and its rows are inputs."""

    plain: Plain
    inputs: Tensor  # [m, c]
    weight: Tensor  # [c, w]
    bias: Tensor | None  # [c]
    activation: str | None

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.inputs.shape[0]

    def initial(self) -> Tensor:
        """Return zeros."""
        return self.inputs.new_zeros(self.weight.shape[1] - 1, self.inputs.shape[1])

    @staticmethod
    def fold(state: Tensor, rows: Rows, count: int) -> tuple[Tensor, Rows]:
        """Return the last inputs before the rows that are left."""
        return torch.cat([state, rows[0][:count]])[count:], (rows[0][count:],)

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the state and what follows it."""
        inputs = torch.cat([state, self.inputs[:count]])
        out = self.plain(inputs.T[None], self.weight, self.bias, activation=self.activation)
        return out[0].T[state.shape[0] :], inputs[count:].clone()

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Gather the inputs of each row and of its ancestors."""
        new, width = self.inputs[first:], self.weight.shape[1]
        inputs = torch.cat([held.state, *held.rows, new])
        # Ancestors lie in the order of their depth, so the last rows that a row sees are itself and those before it.
        sees = torch.cat([visible.new_ones(len(visible), width - 1), visible], 1)
        places = (sees * torch.arange(1, len(inputs) + 1, device=sees.device)).topk(width, 1).values - 1
        taps = inputs[places.flip(1)].to(self.weight.dtype)  # [m, w, c]
        out = torch.einsum("mwc,cw->mc", taps, self.weight)
        out = out if self.bias is None else out + self.bias
        out = out if self.activation is None else ACT2FN[self.activation](out)
        return out.to(new.dtype), (new,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """The gated delta rule: a row writes what its key does not find yet, times its rate."""

    plain: Plain
    queries: Tensor  # [m, g, k]
    keys: Tensor  # [m, g, k]
    values: Tensor  # [m, h, v]
    decays: Tensor  # [m, h], logarithms
    rates: Tensor  # [m, h]
    has_norm: bool  # of queries and keys
    options: dict[str, Any]

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.values.shape[0]

    def initial(self) -> Tensor:
        """Return an empty memory [h, k, v]."""
        shape = self.values.shape[1], self.keys.shape[2], self.values.shape[2]
        return self.values.new_zeros(shape, dtype=torch.float32)

    @staticmethod
    def fold(state: Tensor, rows: Rows, count: int) -> tuple[Tensor, Rows]:
        """Take rows into the memory."""
        return fold_memory(state, rows, count)

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take transformers' chunks."""
        parts = (self.queries, self.keys, self.values)
        out, last = self.plain(
            *(part[None, :count] for part in parts),
            g=self.decays[None, :count],
            beta=self.rates[None, :count],
            initial_state=state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.has_norm,
            **self.options,
        )
        return out[0], last[0].float()

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Solve for what all rows write, under the mask of their ancestors."""
        queries, keys = self._normed(self.queries[first:]), self._normed(self.keys[first:])
        memory = memory_of(held, keys, self.decays[first:].float(), visible)
        weights = memory.weights(keys)  # [h, m, r + m]
        num_open = held.num_open
        known = memory.from_state(keys) + weights[..., :num_open] @ memory.behind
        rates = self.rates[first:].float().T[..., None]
        wanted = rates * (self.values[first:].float().transpose(0, 1) - known)
        system = rates * weights[..., num_open:]  # parents come first; its diagonal is taken to be 1
        written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out = memory.read(queries * queries.shape[-1] ** -0.5, written)
        return out.to(self.queries.dtype), memory.rows(keys.to(self.keys.dtype), written)

    def _normed(self, rows: Tensor) -> Tensor:
        rows = rows.float()
        return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6) if self.has_norm else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba 2's scan: a row writes its own input, times its step."""

    plain: Plain
    inputs: Tensor  # [m, h, v]
    steps: Tensor  # [m, h], as they come
    rates: Tensor  # [h], of the decay of a step
    keys: Tensor  # [m, g, k]
    queries: Tensor  # [m, g, k]
    skip: Tensor | None  # [h]
    step_bias: Tensor | None  # [h]
    has_softplus: bool
    step_limit: tuple[float, float]
    options: dict[str, Any]

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.inputs.shape[0]

    def initial(self) -> Tensor:
        """Return an empty memory [h, k, v]."""
        shape = self.inputs.shape[1], self.keys.shape[2], self.inputs.shape[2]
        return self.inputs.new_zeros(shape, dtype=torch.float32)

    @staticmethod
    def fold(state: Tensor, rows: Rows, count: int) -> tuple[Tensor, Rows]:
        """Take rows into the memory."""
        return fold_memory(state, rows, count)

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take transformers' chunks, whose states are [h, v, k]."""
        inputs, steps, keys, queries = (
            part[None, :count] for part in (self.inputs, self.steps, self.keys, self.queries)
        )
        out, last = self.plain(
            inputs,
            steps,
            self.rates,
            keys,
            queries,
            D=self.skip,
            dt_bias=self.step_bias,
            dt_softplus=self.has_softplus,
            dt_limit=self.step_limit,
            initial_states=state.mT.contiguous()[None],
            return_final_states=True,
            **self.options,
        )
        return out[0].float(), last[0].float().mT.contiguous()

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Read what ancestors wrote, faded by the steps between."""
        steps = self.steps[first:]
        steps = steps if self.step_bias is None else steps + self.step_bias.to(steps.dtype)
        steps = (softplus(steps) if self.has_softplus else steps).clamp(*self.step_limit).float()
        inputs, keys = self.inputs[first:].float(), self.keys[first:]
        memory = memory_of(held, keys, self.rates.float() * steps, visible)
        written = (steps[..., None] * inputs).transpose(0, 1)
        out = memory.read(self.queries[first:], written)
        out = out if self.skip is None else out + self.skip.float()[:, None] * inputs
        return out, memory.rows(keys, written)
