"""The rows that are likely to be asked for are made in one read of the head."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.tree.token_tree import TokenTree
from edgespec.verify.likely import MIN_CHANCE, likely_nodes
from edgespec.verify.rows import RowNeededError, TargetRows

VOCAB = 12
SAMPLING = SamplingSettings(temperature=0.8)


def tree(scores: list[float] | None) -> TokenTree:
    """The root's children are 1, 2 and 3, below 1 stands 4, below 4 stand 5 and 6."""
    parents = torch.tensor([-1, 0, 0, 0, 1, 4, 4])
    return TokenTree(
        tokens=torch.arange(7),
        parents=parents,
        ranks=torch.tensor([0, 0, 1, 2, 0, 0, 1]),
        draw="coupled",
        draft_rows=torch.full_like(parents, -1),
        scores=None if scores is None else torch.tensor([torch.inf, *scores]),
    )


def test_the_best_nodes_are_likely_if_their_chance_is_worth_a_row() -> None:
    grown = tree([0.7, 0.25, MIN_CHANCE / 2, 0.5, 0.3, 0.01])
    assert likely_nodes(grown) == (0, 1, 4, 5, 2)
    assert likely_nodes(grown, most=2) == (0, 1)


def test_of_a_shape_the_first_children_are_likely() -> None:
    assert sorted(likely_nodes(tree(None))) == [0, 1, 4, 5]


def test_a_root_alone_asks_for_nothing_more() -> None:
    grown = tree(None)
    alone = replace(grown, tokens=grown.tokens[:1], parents=grown.parents[:1], ranks=grown.ranks[:1], scores=None)
    assert likely_nodes(alone) == (0,)


@pytest.mark.parametrize("asked", [[0, 1, 4, 5], [0, 2], [3, 0, 6]], ids=str)
def test_rows_made_together_are_those_of_their_nodes(asked: list[int]) -> None:
    """Each with its own processing, whichever is asked for first, and no read for what is known."""
    hidden, weight, reads = torch.randn(7, 5), torch.randn(5, VOCAB), []

    def head(some: Tensor) -> Tensor:
        reads.append(some.shape[0])
        return some @ weight

    def process(logits: Tensor, node: int) -> Tensor:
        return logits + node * torch.arange(VOCAB)

    likely = (0, 1, 4, 5)
    rows = TargetRows(hidden, head, SAMPLING, vocab=VOCAB, likely=likely, process=process)
    alone = TargetRows(hidden, lambda some: some @ weight, SAMPLING, vocab=VOCAB, process=process)
    for node in asked:
        torch.testing.assert_close(rows.probs(node), alone.probs(node))
    first = 4 if asked[0] in likely else 5
    assert reads == [first, *(1 for node in asked[1:] if node not in likely)]


def test_texts_in_company_tell_what_else_to_make() -> None:
    hidden, weight = torch.randn(7, 5), torch.randn(5, VOCAB)
    rows = TargetRows(hidden, lambda some: some @ weight, SAMPLING, vocab=VOCAB, waits=True, likely=(0, 1, 4))
    with pytest.raises(RowNeededError) as needed:
        rows.probs(0)
    nodes = rows.beside(needed.value.node)
    assert nodes == (0, 1, 4)
    for node in nodes:
        rows.know(node, rows.hidden([node]) @ weight)
    torch.testing.assert_close(rows.best(4), int((hidden[4] @ weight).argmax()))
    with pytest.raises(RowNeededError):
        rows.probs(2)
    assert rows.beside(2) == (2,)
