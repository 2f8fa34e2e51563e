"""The target's rows after a pass: distributions of the nodes that verification asks about, on the device.

The head turns hidden states into logits only where they are needed: [n, vocab] of a large tree would
not fit beside a large vocabulary, and most of its rows would never be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.sampling import to_probs

CHUNK_BYTES = 32 << 20  # of float32 logits at once


class Rows:
    """What the target says after every node of a tree, n in all."""

    def __init__(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor], sampling: SamplingSettings, *, vocab: int
    ) -> None:
        """From last hidden states [n, h]; `head` makes logits [k, vocab] of k of them."""
        self._hidden = hidden
        self._rows_at_once = max(1, CHUNK_BYTES // (4 * vocab))
        self._head = head
        self._sampling = sampling

    def probs(self, node: int) -> Tensor:
        """P after a node, [vocab], as it is sampled from; raises EdgespecError for NaN."""
        return to_probs(self._logits(slice(node, node + 1)), self._sampling)[0]

    def argmax(self) -> Tensor:
        """The target's first choice after every node: [n]."""
        return torch.cat([self._logits(rows).argmax(-1) for rows in self._chunks()])

    def all_probs(self) -> Tensor:
        """P after all nodes at once, [n, vocab]: for records and comparisons, which look at every row."""
        return torch.cat([to_probs(self._logits(rows), self._sampling) for rows in self._chunks()])

    def _logits(self, rows: slice) -> Tensor:
        logits = self._head(self._hidden[rows])
        # A wait for the device; verification waits for what it makes of these a moment later.
        if bool(logits.isnan().any()):
            raise EdgespecError(
                "E_NAN_LOGITS",
                "the target's logits are NaN.",
                "Try --dtype float32 or bfloat16; if it stays, the checkpoint's weights are damaged.",
            )
        return logits

    def _chunks(self) -> Iterator[slice]:
        num_rows, at_once = self._hidden.shape[0], self._rows_at_once
        return (slice(start, min(start + at_once, num_rows)) for start in range(0, num_rows, at_once))
