"""The head computes the rows that texts lack in one read, and those that they are likely to read next beside them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode.accept import _compute_rows, _Walk
from edgespec.verify.rows import TargetRows

VOCAB = 12
SAMPLING = SamplingSettings(temperature=0.8)
WEIGHT = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))


def process(logits: Tensor, node: int) -> Tensor:
    return logits + node * torch.arange(VOCAB)


def walks_of(likely: list[tuple[int, ...]], reads: list[int]) -> tuple[list[_Walk], list[TargetRows]]:
    """A text for each tuple of likely nodes, and its rows computed one by one."""

    def head(some: Tensor) -> Tensor:
        reads.append(some.shape[0])
        return some @ WEIGHT

    sequence: Any = SimpleNamespace(target=SimpleNamespace(logits=head, vocab=VOCAB))
    walks, alone = [], []
    for nodes in likely:
        hidden = torch.randn(7, 5)
        rows = TargetRows(hidden, head, SAMPLING, vocab=VOCAB, process=process)
        walks.append(_Walk(sequence, rows, nodes, iter(())))
        alone.append(TargetRows(hidden, lambda some: some @ WEIGHT, SAMPLING, vocab=VOCAB, process=process))
    return walks, alone


@pytest.mark.parametrize("nodes", [[0, 1, 4, 5], [0, 2], [3, 0, 6]], ids=str)
def test_rows_computed_together_are_those_of_their_nodes(nodes: list[int]) -> None:
    """Each with its own processing, whichever is lacking first, and no read for what is known."""
    reads: list[int] = []
    likely = (0, 1, 4, 5)
    (walk,), (alone,) = walks_of([likely], reads)
    for node in nodes:
        if not walk.rows.knows(node):
            _compute_rows([(walk, node)])
        torch.testing.assert_close(walk.rows.probs(node), alone.probs(node))
    first = 4 if nodes[0] in likely else 5
    assert reads == [first, *(1 for node in nodes[1:] if node not in likely)]


def test_texts_share_a_read_of_the_head() -> None:
    reads: list[int] = []
    walks, alone = walks_of([(0, 1, 4), (0,), (0, 2)], reads)
    _compute_rows([(walk, 0) for walk in walks])
    _compute_rows([(walks[0], 3), (walks[2], 6)])
    assert reads == [6, 2]
    for walk, expected, nodes in zip(walks, alone, [(0, 1, 3, 4), (0,), (0, 2, 6)], strict=True):
        assert [node for node in range(7) if walk.rows.knows(node)] == list(nodes)
        for node in nodes:
            torch.testing.assert_close(walk.rows.probs(node), expected.probs(node))
