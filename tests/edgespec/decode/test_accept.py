"""The head computes the rows that texts lack in one read, and those that they are likely to read next beside them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode import accept
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

    sequence: Any = SimpleNamespace(
        target=SimpleNamespace(logits=lambda rows, _=None: head(rows), vocab=VOCAB, adapters=())
    )
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


def test_rows_that_the_head_reads_in_chunks_have_their_own_texts_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.model.row_chunks.CHUNK_BYTES", 2 * VOCAB * 4)
    read: list[tuple[int, Any]] = []
    walks, _ = walks_of([(0, 1), (0,), (0, 2)], [])
    for number, walk in enumerate(walks):

        def logits(rows: Tensor, runs: Any) -> Tensor:
            read.append((len(rows), runs))
            return rows @ WEIGHT

        own: Any = SimpleNamespace(logits=logits, vocab=VOCAB, adapters=((f"{number}", 1.0),))
        object.__setattr__(walk, "sequence", SimpleNamespace(target=own))
    _compute_rows([(walk, 0) for walk in walks])
    assert [rows for rows, _ in read] == [2, 2, 1]
    assert [[use[0][0] for use, _ in runs] for _, runs in read] == [["0", "0"], ["1", "2"], ["2"]]


def test_one_thread_takes_a_texts_path_and_all_threads_compute_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines' tuned numbers of threads are as they were behind it, where a text fails, too."""
    reads: list[int] = []
    walks, _ = walks_of([(0,), (0,)], reads)
    threads = {"path": set[int](), "rows": set[int]()}

    def path(walk: _Walk, *, fails: bool) -> Iterator[int]:
        threads["path"].add(torch.get_num_threads())
        yield 0
        threads["path"].add(torch.get_num_threads())
        if fails:
            raise ValueError("this text alone")

    for walk, fails in zip(walks, (True, False), strict=True):
        object.__setattr__(walk, "nodes", path(walk, fails=fails))
    left = iter(walks)
    compute = accept._compute_rows
    monkeypatch.setattr(accept, "_walk", lambda *_, **__: next(left))
    monkeypatch.setattr(
        accept, "_compute_rows", lambda lacking: (threads["rows"].add(torch.get_num_threads()), compute(lacking))
    )
    own = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        trees: Any = [(walk.sequence, None) for walk in walks]
        _, failed = accept.accept_batched(trees, [torch.zeros(1)] * 2, [True, True])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(own)
    assert [str(error) for _, error in failed] == ["this text alone"]
    assert threads == {"path": {1}, "rows": {3}}
