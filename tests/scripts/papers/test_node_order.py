"""Depth-first order against a literal walk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgespec.tree.token_tree import ancestors_mask
from tests.edgespec.verify.test_walks import random_tree
from tests.support.node_order import depth_first_order, num_blocks, reordered


def walk(parents: list[int], node: int = 0) -> list[int]:
    return [node, *(below for child in range(len(parents)) if parents[child] == node for below in walk(parents, child))]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("nodes", [1, 2, 60])
def test_the_order_is_that_of_a_walk(seed: int, nodes: int) -> None:
    tree = random_tree(torch.Generator().manual_seed(seed), nodes=nodes, vocab=50)
    assert depth_first_order(tree.parents).tolist() == walk(tree.parents.tolist())


@pytest.mark.parametrize("seed", range(10))
def test_a_reordered_tree_is_the_same_tree(seed: int) -> None:
    tree = random_tree(torch.Generator().manual_seed(seed), nodes=60, vocab=50)
    order = depth_first_order(tree.parents)
    after = reordered(tree, order)
    assert all(parent < node for node, parent in enumerate(after.parents.tolist()))
    assert torch.equal(ancestors_mask(after.parents), ancestors_mask(tree.parents)[order][:, order])
    assert torch.equal(after.tokens, tree.tokens[order])
    assert torch.equal(after.draft_rows, tree.draft_rows[order])


def literal_blocks(mask: Tensor, block: int, num_before: int) -> int:
    size = mask.shape[0]
    rows = {
        (row // block, key // block)
        for row in range(size)
        for key in range(num_before + size)
        if key < num_before or mask[row, key - num_before]
    }
    return len(rows)


@pytest.mark.parametrize(("block", "num_before"), [(4, 0), (8, 5), (32, 0), (7, 14)])
def test_blocks_are_counted(block: int, num_before: int) -> None:
    mask = ancestors_mask(random_tree(torch.Generator().manual_seed(1), nodes=45, vocab=9).parents)
    assert num_blocks(mask, block=block, num_before=num_before) == literal_blocks(mask, block, num_before)


def test_depth_first_leaves_fewer_blocks() -> None:
    chains = torch.tensor([-1, *[0] * 16, *range(1, 16 * 15 + 1)])  # a fork, layer by layer
    mask, order = ancestors_mask(chains), depth_first_order(chains)
    assert num_blocks(mask[order][:, order], block=16) < num_blocks(mask, block=16) / 2
