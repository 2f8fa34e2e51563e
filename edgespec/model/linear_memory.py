"""A memory that rows write to and read from, and that fades: what the gated delta rule and Mamba 2 have in common.

The memory of a row is its state [k, v], faded, and what its ancestors wrote, each faded by the steps between. Legend:
m new rows, r rows behind the state, g heads of keys, h heads of values, k and v the dimensions of keys and of what is
written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.model.state_cache import Rows, StateRows


def fold_memory(state: Tensor, rows: Rows, count: int) -> tuple[Tensor, Rows]:
    """Take the first `count` rows, each below the one before, into a state [h, k, v]; return it and the rows left."""
    keys, written, since = rows  # [r, g, k], [r, h, v], [r, h]
    last = since[count - 1]
    faded = written[:count].float() * (last - since[:count]).exp()[..., None]
    added = torch.einsum("rhk,rhv->hkv", _for_heads(keys[:count].float(), faded.shape[1]), faded)
    left = keys[count:], written[count:], since[count:] - last
    return last.exp()[:, None, None] * state + added, left


def _for_heads(keys: Tensor, heads: int) -> Tensor:
    """Return keys [..., g, k], a group's for each of its heads: [..., h, k]."""
    return keys if keys.shape[-2] == heads else keys.repeat_interleave(heads // keys.shape[-2], -2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMemory:
    """What each of m rows finds: a faded state, and what rows that it sees have written."""

    state: Tensor  # [h, k, v]
    keys: Tensor  # [h, k, r + m], of the rows behind the state and of the new ones
    behind: Tensor  # [h, r, v], what those behind the state wrote
    since: Tensor  # [m, h], the logarithm of what is left of the state
    fade: Tensor  # [h, m, r + m], what is left of each row's writing; 0 where it is not seen

    def from_state(self, keys: Tensor) -> Tensor:
        """Return what each row's key [m, g, k] finds in the state: [h, m, v]."""
        heads = self.state.shape[0]
        return self.since.exp().T[..., None] * (_for_heads(keys.float(), heads).transpose(0, 1) @ self.state)

    def weights(self, keys: Tensor) -> Tensor:
        """Return how much each row's key [m, g, k] finds of what each row wrote: [h, m, r + m]."""
        return (_for_heads(keys.float(), self.state.shape[0]).transpose(0, 1) @ self.keys) * self.fade

    def read(self, queries: Tensor, written: Tensor) -> Tensor:
        """Return what queries [m, g, k] find, where the new rows write [h, m, v]: [m, h, v]."""
        found = self.from_state(queries) + self.weights(queries) @ torch.cat([self.behind, written], 1)
        return found.transpose(0, 1)

    def rows(self, keys: Tensor, written: Tensor) -> Rows:
        """Return what is kept of the new rows, of keys [m, g, k] and what they write [h, m, v]."""
        return keys, written.transpose(0, 1).to(keys.dtype), self.since


def memory_of(held: StateRows, keys: Tensor, decays: Tensor, visible: Tensor) -> LinearMemory:
    """Return the memory of rows with keys [m, g, k] and logarithms of their decays [m, h].

    `visible` [m, r + m] says which rows each of them sees, itself among them.
    """
    heads, num_open = decays.shape[1], held.num_open
    before, behind = decays.new_zeros(num_open, heads), decays.new_zeros(num_open, heads, held.state.shape[2])
    if held.rows:
        behind_keys, written, before = held.rows
        keys, behind = torch.cat([behind_keys, keys]), written.float()
    # The last row behind the state that a row sees is the last of its ancestors there.
    nearest = (visible[:, :num_open] * torch.arange(1, num_open + 1, device=visible.device)).amax(1) if num_open else 0
    since = torch.cat([before.new_zeros(1, heads), before])[nearest] + visible[:, num_open:].float() @ decays
    between = since.T[:, :, None] - torch.cat([before, since]).T[:, None, :]
    return LinearMemory(
        state=held.state,
        keys=_for_heads(keys.float(), heads).permute(1, 2, 0),
        behind=behind.transpose(0, 1),
        since=since,
        fade=between.masked_fill(~visible, -torch.inf).exp(),
    )
