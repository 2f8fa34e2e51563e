"""Convolutions, tokens looked back to, the gated delta rule and Mamba 2 at the rows of one text, each in two forms.

Rows of a tree, and the last ones of a text, are computed all at once from the state and leave it as it is. Rows of a
long text pass through transformers' own function (`plain`) from state to state.

The order of sums depends on how many rows lie open, and so on the trees. Where a tree's row is to have the bits of
plain decoding, memories are computed in float64, and the order does not show in what is rounded from them.

The delta rule and Mamba 2 have a fading memory. A row reads its state [k, v], faded, and the writing of its ancestors,
each faded by the steps between. Legend: m new rows, r open rows (after the state), c channels, w taps, g heads of keys,
h heads of values, k and v their dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from edgespec.machine.device import keeps_row_bits
from edgespec.model.mechanisms.state_cache import OPEN_ROWS, Fold, Rows, StateRows

Plain = Callable[..., Any]


class Form(Protocol):
    """A recurrent function at rows of one text."""

    @property
    def fold(self) -> Fold:
        """The function that takes the first rows after a state into it."""

    @property
    def rows_at_once(self) -> int:
        """The number of rows that a state takes in at once: it stands behind a multiple of it."""

    def initial(self) -> Tensor:
        """Return the state before a text."""

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [count, ...] of the first rows, each the child of the one before, and the state after."""

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Return the outputs [m - first, ...] of the rows from `first` on, and their parts for the cache.

        `visible` [m - first, r + m - first] marks the rows that each of them sees, among the rows after the state and
        the new ones.
        """


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensBefore:
    """The tokens before each row: outputs [m, w - 1]. The state is those before the rows after it, [w - 1, 1]."""

    ids: Tensor  # [m, 1]
    width: int  # w, of a row's own token and those before it
    padding: int  # the token before a text

    fold = staticmethod(fold_inputs)
    rows_at_once = OPEN_ROWS

    def initial(self) -> Tensor:
        """Return the padding."""
        return torch.full_like(self.ids[:1], self.padding).expand(self.width - 1, 1).clone()

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Look back along the text."""
        ids = torch.cat([state, self.ids[:count]])
        return ids[:-1, 0].unfold(0, self.width - 1, 1), ids[count:].clone()

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Look back along each row's path."""
        new = self.ids[first:]
        return last_inputs(held, new, visible)[:, :-1, 0], (new,)


def fold_memory(state: Tensor, rows: Rows, count: int) -> tuple[Tensor, Rows]:
    """Take the first `count` rows, each the child of the one before, into a state [h, k, v]; return it and the rest."""
    keys, written, since = rows  # [r, g, k], [r, h, v], [r, h]
    last = since[count - 1]
    faded = written[:count].to(since.dtype) * (last - since[:count]).exp()[..., None]
    added = torch.einsum("rhk,rhv->hkv", _for_heads(keys[:count].to(since.dtype), faded.shape[1]), faded)
    left = keys[count:], written[count:], since[count:] - last
    return last.exp()[:, None, None] * state + added, left


def _for_heads(keys: Tensor, heads: int) -> Tensor:
    """Return keys [..., g, k] repeated for each head of their group: [..., h, k]."""
    return keys if keys.shape[-2] == heads else keys.repeat_interleave(heads // keys.shape[-2], -2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMemory:
    """The memory that each of m rows reads: a faded state, and the writing of the rows that it sees."""

    state: Tensor  # [h, k, v]
    keys: Tensor  # [h, k, r + m], of the open rows and of the new ones
    open: Tensor  # [h, r, v], the writing of the open rows
    since: Tensor  # [m, h], the logarithm of the remaining share of the state
    fade: Tensor  # [h, m, r + m], the remaining share of each row's writing; 0 where it is not seen

    def found(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return what rows of n series find at keys [n * m, g, k]: by the state [h, n * m, v], and each row's weights.

        These [h, n * m, r + m] are of the rows' writing. A state is read from memory once, whatever is looked for.
        """
        by_heads = _for_heads(keys.to(self.state.dtype), self.state.shape[0]).transpose(0, 1)
        series = keys.shape[0] // self.since.shape[0]
        share = self.since.exp().T.repeat(1, series)[..., None]
        return share * (by_heads @ self.state), (by_heads @ self.keys) * self.fade.repeat(1, series, 1)

    def rows(self, keys: Tensor, written: Tensor) -> Rows:
        """Return the parts of the new rows that a cache keeps: keys [m, g, k] and the writing [h, m, v]."""
        written = written.transpose(0, 1)
        return keys, written if self.since.dtype == torch.float64 else written.to(keys.dtype), self.since


def memory_dtype(rows: Tensor) -> torch.dtype:
    """Return the dtype of the memory of rows."""
    return torch.float64 if keeps_row_bits(rows.dtype, rows.device) else torch.float32


def memory_of(held: StateRows, keys: Tensor, decays: Tensor, visible: Tensor) -> LinearMemory:
    """Return the memory of rows with keys [m, g, k] and logarithms of their decays [m, h].

    `visible` [m, r + m] marks the rows that each of them sees, itself among them.
    """
    heads, num_open, dtype = decays.shape[1], held.num_open, decays.dtype
    before, open_rows = decays.new_zeros(num_open, heads), decays.new_zeros(num_open, heads, held.state.shape[2])
    if held.rows:
        open_keys, written, before = held.rows
        keys, open_rows, before = torch.cat([open_keys, keys]), written.to(dtype), before.to(dtype)
    # The last open row that a row sees is the last of its ancestors there.
    nearest = (visible[:, :num_open] * torch.arange(1, num_open + 1, device=visible.device)).amax(1) if num_open else 0
    since = torch.cat([before.new_zeros(1, heads), before])[nearest] + visible[:, num_open:].to(dtype) @ decays
    between = since.T[:, :, None] - torch.cat([before, since]).T[:, None, :]
    return LinearMemory(
        state=held.state.to(dtype),
        keys=_for_heads(keys.to(dtype), heads).permute(1, 2, 0),
        open=open_rows.transpose(0, 1),
        since=since,
        fade=between.masked_fill(~visible, -torch.inf).exp(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryForm:
    """Rows that write to a memory by their keys and read it by their queries."""

    plain: Plain
    inputs: Tensor  # [m, h, v]
    keys: Tensor  # [m, g, k]
    queries: Tensor  # [m, g, k]
    options: dict[str, Any]  # the other arguments of transformers' function, by name

    fold = staticmethod(fold_memory)
    rows_at_once = OPEN_ROWS

    def initial(self) -> Tensor:
        """Return an empty memory [h, k, v]."""
        shape = self.inputs.shape[1], self.keys.shape[2], self.inputs.shape[2]
        return self.inputs.new_zeros(shape, dtype=memory_dtype(self.inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(_MemoryForm):
    """The gated delta rule: a row writes the part of its input that its key does not find yet, times its rate."""

    decays: Tensor  # [m, h], logarithms
    rates: Tensor  # [m, h]

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the rows by transformers' chunks."""
        out, last = self.plain(
            *(part[None, :count] for part in (self.queries, self.keys, self.inputs)),
            g=self.decays[None, :count],
            beta=self.rates[None, :count],
            **self.options | {"initial_state": state[None], "output_final_state": True},
        )
        return out[0], last[0].to(state.dtype)

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Solve for the writing of all rows, under the mask of their ancestors."""
        dtype, kept = memory_dtype(self.inputs), self.keys.dtype
        queries = self._normed(self.queries[first:].to(dtype)) * self.queries.shape[-1] ** -0.5
        keys = self._normed(self.keys[first:].to(dtype)).to(kept)  # as later rows will find them
        memory = memory_of(held, keys, self.decays[first:].to(dtype), visible)
        by_state, weights = memory.found(torch.cat([keys.to(dtype), queries]))
        num_rows, num_open = len(keys), held.num_open
        known = by_state[:, :num_rows] + weights[:, :num_rows, :num_open] @ memory.open
        rates = self.rates[first:].to(dtype).T[..., None]
        unknown = rates * (self.inputs[first:].to(dtype).transpose(0, 1) - known)
        system = rates * weights[:, :num_rows, num_open:]  # parents come first; its diagonal is taken to be 1
        written = torch.linalg.solve_triangular(system, unknown, upper=False, unitriangular=True)
        out = by_state[:, num_rows:] + weights[:, num_rows:] @ torch.cat([memory.open, written], 1)
        return out.transpose(0, 1).to(self.queries.dtype), memory.rows(keys, written)

    def _normed(self, rows: Tensor) -> Tensor:
        is_normed = self.options.get("use_qk_l2norm_in_kernel", False)
        return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6) if is_normed else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(_MemoryForm):
    """Mamba 2's scan: a row writes its own input, times its step."""

    steps: Tensor  # [m, h], before bias, softplus and limits
    rates: Tensor  # [h], of the decay of a step

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the rows by transformers' chunks, whose states are [h, v, k]."""
        inputs, steps, keys, queries = (
            part[None, :count] for part in (self.inputs, self.steps, self.keys, self.queries)
        )
        states = {"initial_states": state.mT.contiguous()[None], "return_final_states": True}
        out, last = self.plain(inputs, steps, self.rates, keys, queries, **self.options | states)
        return out[0].float(), last[0].to(state.dtype).mT.contiguous()

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Read the writing of ancestors, faded by the steps between."""
        dtype = memory_dtype(self.inputs)
        bias, skip = self.options.get("dt_bias"), self.options.get("D")  # [h] each
        steps = self.steps[first:]
        steps = steps if bias is None else steps + bias.to(steps.dtype)
        steps = softplus(steps) if self.options.get("dt_softplus") else steps
        steps = steps.clamp(*self.options.get("dt_limit", (0.0, math.inf))).to(dtype)
        inputs, keys = self.inputs[first:].to(dtype), self.keys[first:]
        memory = memory_of(held, keys, self.rates.to(dtype) * steps, visible)
        written = (steps[..., None] * inputs).transpose(0, 1)
        by_state, weights = memory.found(self.queries[first:])
        out = (by_state + weights @ torch.cat([memory.open, written], 1)).transpose(0, 1)
        out = out if skip is None else out + skip.to(dtype)[:, None] * inputs
        return out.float(), memory.rows(keys, written)
