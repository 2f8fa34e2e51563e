"""The nodes whose rows are computed together, because a path is likely to visit them."""

from dataclasses import replace

import torch

from edgespec.decode.accept import MIN_CHANCE, likely_nodes
from edgespec.tree.token_tree import TokenTree


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
