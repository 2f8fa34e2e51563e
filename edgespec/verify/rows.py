"""The target's rows after a pass: distributions of the nodes that verification visits, on the device.

The head turns hidden states into logits only where they are needed: logits [n, vocab] of a large tree would
not fit beside a large vocabulary, and most of its rows would never be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.model.row_chunks import row_chunks
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.logprobs import TokenLogprob, token_logprobs
from edgespec.to_device import on_device
from edgespec.verify.paths import ProcessNode


class TargetRows:
    """What the target says after every node of a tree, n in all. Its methods raise EdgespecError for NaN."""

    def __init__(
        self,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        sampling: SamplingSettings,
        *,
        vocab: int,
        process: ProcessNode | None = None,
    ) -> None:
        """Hold last hidden states [n, h]; `head` makes logits [k, vocab] of k of them.

        `process` changes the logits after each node, if given, before they become probabilities.
        """
        self._hidden = hidden
        self._head = head
        self._sampling = sampling
        self._vocab = vocab
        self._process = process
        self.is_near_tie: Callable[[int, int, int], bool] | None = None  # of a node, its depth and the token after it
        self._processed: dict[int, Tensor] = {}  # logits [1, vocab]
        self._known: dict[int, Tensor] = {}  # logits [1, vocab]
        self._probs: dict[int, Tensor] = {}

    def of(self, nodes: Tensor) -> TargetRows:
        """Return the rows of some nodes [k] alone, numbered from 0."""
        rows = TargetRows(self._hidden[nodes], self._head, self._sampling, vocab=self._vocab)
        if self._process is not None:
            numbers, process = nodes.tolist(), self._process
            rows._process = lambda logits, node: process(logits, numbers[node])
        return rows

    def knows(self, node: int) -> bool:
        """Return whether the logits of a node are known."""
        return node in self._known

    def hidden(self, nodes: Sequence[int]) -> Tensor:
        """Return the last hidden states [k, h] of nodes."""
        if len(nodes) == 1:
            return self._hidden[nodes[0] : nodes[0] + 1]
        return self._hidden[on_device(nodes, self._hidden.device)]

    def know(self, node: int, logits: Tensor) -> None:
        """Take the logits [1, vocab] of a node."""
        self._known[node] = logits

    def probs(self, node: int) -> Tensor:
        """Return p [vocab] after a node, as it is sampled from; float32 at least."""
        if node not in self._probs:
            logits = self.logits(node)
            refuse_nan(logits.amax(-1), is_processed=self._process is not None)
            self._probs[node] = to_probs(logits, self._sampling)[0]
        return self._probs[node]

    def best(self, node: int) -> int:
        """Return the target's first choice after a node."""
        largest, index = _first_largest(self.logits(node))
        refuse_nan(largest, is_processed=self._process is not None)
        return index

    def logprobs(self, nodes: Sequence[int], tokens: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
        """Return the model's own log-probabilities of tokens [k] after nodes [k], and of the `count` likeliest."""
        return token_logprobs(torch.cat([self.own_logits(node) for node in nodes]), tokens, count)

    def logits(self, node: int) -> Tensor:
        """Return the logits [1, vocab] of a node as its text has them."""
        if self._process is None:
            return self.own_logits(node)
        if node not in self._processed:
            logits = self.own_logits(node)
            refuse_nan(logits.amax(-1))
            self._processed[node] = self._process(logits, node)
        return self._processed[node]

    def own_logits(self, node: int) -> Tensor:
        """Return the model's logits [1, vocab] of a node."""
        if node not in self._known:
            self._known[node] = self._head(self.hidden([node]))
        return self._known[node]

    def all_probs(self) -> Tensor:
        """Return p [n, vocab] after all nodes at once, for records and comparisons, which look at every row."""
        probs = []
        for rows in self._chunks():
            logits = self._head(self._hidden[rows])
            refuse_nan(logits.amax(-1))
            if self._process is not None:
                process = self._process
                nodes = range(rows.start, rows.stop)
                logits = torch.cat([process(row, node) for node, row in zip(nodes, logits.split(1), strict=True)])
            probs.append(to_probs(logits, self._sampling))
        return torch.cat(probs)

    def _chunks(self) -> list[slice]:
        return list(row_chunks(self._hidden.shape[0], self._vocab))


def _first_largest(logits: Tensor) -> tuple[Tensor, int]:
    """Return the largest of logits [1, vocab], [1], and its place: the first one of equal ones, or of NaN."""
    if logits.device.type != "cpu":
        largest, index = logits.max(-1)
        return largest, int(index)
    # A fifth of the time of torch's own, which for a large vocabulary is a part of a step.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    found = int(wide.detach()[0].numpy().argmax())
    return wide[:, found], found


def refuse_nan(largest: Tensor, *, is_processed: bool = False) -> None:
    """Raise EdgespecError where one of the largest numbers of rows, of any shape, is NaN or infinite.

    The largest number of a row that has a NaN is NaN. This waits for the device, as its callers would do a moment later
    for what they make of these rows. Rows that are processed were finite before a text's penalties and bias.
    """
    if all(map(math.isfinite, largest.flatten().tolist())):
        return
    if not is_processed:
        raise not_finite()
    what = "the text's penalties make logits NaN or infinite."
    raise EdgespecError("E_NAN_LOGITS", what, "Use a `repetition_penalty` nearer to 1.")


def not_finite() -> EdgespecError:
    """Return the error of a text whose logits are no numbers."""
    return EdgespecError(
        "E_NAN_LOGITS",
        "the target's logits are NaN or infinite.",
        "Try `dtype=float32` or bfloat16; if it stays, the checkpoint's weights are damaged.",
    )
