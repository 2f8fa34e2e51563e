"""Memories that fade: a row reads a state [k, v] and the writing of its ancestors, each faded by the steps between.

Legend: m new rows, r open rows (after the state), g groups of heads of keys, h heads of values, k and v their
dimensions.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from edgespec.machine.device import keeps_row_bits
from edgespec.model.mechanisms.recurrent import NUM_ROW_COPIES, Plain, RecurrentFunction, convolution_of
from edgespec.model.mechanisms.state_cache import OPEN_ROWS, Rows, StateRows, StateSizes

FLOAT32_BYTES, FLOAT64_BYTES = 4, 8
NUM_PAIR_COPIES = 4  # of what two rows of a tree have in common for each head


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
class MemoryForm:
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


class FadingMemory(RecurrentFunction):
    """A memory of what rows wrote by their keys."""

    shape_names: ClassVar[tuple[str, str, str, str]]  # a mixer's groups, a key's width, heads, and a value's width

    def sizes(self, mixer: nn.Module, dtype: torch.dtype, *, num_inputs: int, keeps_row_bits: bool) -> StateSizes:
        """Return those of a mixer's memory, and of the rows beside it."""
        if convolution_of(mixer) is None or not all(hasattr(mixer, name) for name in self.shape_names):
            return StateSizes()
        groups, key_width, heads, value_width = (int(getattr(mixer, name)) for name in self.shape_names)
        wide, written = (FLOAT64_BYTES, FLOAT64_BYTES) if keeps_row_bits else (FLOAT32_BYTES, dtype.itemsize)
        return StateSizes(
            state_bytes=heads * key_width * value_width * wide,
            row_bytes=groups * key_width * dtype.itemsize + heads * (value_width * written + wide),
            work_bytes=NUM_ROW_COPIES * heads * (key_width + value_width) * wide,
            pair_bytes=NUM_PAIR_COPIES * heads * wide,
        )
