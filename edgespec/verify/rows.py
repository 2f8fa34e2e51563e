"""The target's rows after a pass: distributions of the nodes that verification asks about, on the device.

The head turns hidden states into logits only where they are needed: logits [n, vocab] of a large tree would
not fit beside a large vocabulary, and most of its rows would never be looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.model.row_chunks import row_chunks
from edgespec.sampling.distribution import to_probs


class TargetRows:
    """What the target says after every node of a tree, n in all. Its methods raise EdgespecError for NaN."""

    def __init__(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor], sampling: SamplingSettings, *, vocab: int
    ) -> None:
        """Hold last hidden states [n, h]; `head` makes logits [k, vocab] of k of them."""
        self._hidden = hidden
        self._head = head
        self._sampling = sampling
        self._vocab = vocab

    def of(self, nodes: Tensor) -> TargetRows:
        """Return the rows of some nodes [k] alone, numbered from 0."""
        return TargetRows(self._hidden[nodes], self._head, self._sampling, vocab=self._vocab)

    def probs(self, node: int) -> Tensor:
        """Return p [vocab] after a node, as it is sampled from; float32 at least."""
        logits = self._head(self._hidden[node : node + 1])
        refuse_nan(logits.amax(-1))
        return to_probs(logits, self._sampling)[0]

    def best(self, node: int) -> int:
        """Return the target's first choice after a node."""
        largest, index = self._head(self._hidden[node : node + 1]).max(-1)
        refuse_nan(largest)
        return int(index)

    def all_probs(self) -> Tensor:
        """Return p [n, vocab] after all nodes at once, for records and comparisons, which look at every row."""
        probs = []
        for rows in self._chunks():
            logits = self._head(self._hidden[rows])
            refuse_nan(logits.amax(-1))
            probs.append(to_probs(logits, self._sampling))
        return torch.cat(probs)

    def _chunks(self) -> list[slice]:
        return list(row_chunks(self._hidden.shape[0], self._vocab))


def refuse_nan(largest: Tensor) -> None:
    """Raise EdgespecError where one of rows' largest numbers [n] is NaN or infinite.

    The largest number of a row that has a NaN is NaN. This waits for the device, as its callers would do a moment later
    for what they make of these rows.
    """
    if not bool(largest.isfinite().all()):
        raise not_finite()


def not_finite() -> EdgespecError:
    """Return the error of a text whose logits are no numbers."""
    return EdgespecError(
        "E_NAN_LOGITS",
        "the target's logits are NaN or infinite.",
        "Try `dtype=float32` or bfloat16; if it stays, the checkpoint's weights are damaged.",
    )
