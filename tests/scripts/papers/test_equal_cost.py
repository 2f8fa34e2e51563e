"""Drafts are compared with the built-in draft's best tree of those that take no longer to grow."""

from __future__ import annotations

from scripts.papers.published.equal_cost import Grown, best_within, equal_cost_table


def tree(nodes: int, depth: int, tokens: float, grow_ms: float) -> Grown:
    return Grown(nodes=nodes, depth=depth, tokens=tokens, grow_ms=grow_ms)


TREES = [tree(1, 1, 1.5, 3.0), tree(8, 4, 2.6, 9.0), tree(8, 8, 2.7, 15.0), tree(64, 2, 2.4, 8.0)]


def test_the_tree_of_most_tokens_is_of_those_that_cost_no_more() -> None:
    assert best_within(tree(64, 8, 0.0, 9.0), TREES) is TREES[1]
    assert best_within(tree(64, 8, 0.0, 8.9), TREES) is TREES[3]
    assert best_within(tree(63, 8, 0.0, 8.9), TREES) is TREES[0]
    assert best_within(tree(1, 8, 0.0, 3.0), TREES) is TREES[0]
    assert best_within(tree(64, 8, 0.0, 2.9), TREES) is None


def test_the_table_has_each_cells_own_cost_and_temperature() -> None:
    found = {"head": {"T 0": tree(64, 8, 2.0, 9.5), "T 1": tree(64, 8, 1.9, 9.5), "T 1, less": tree(1, 8, 1.2, 2.0)}}
    warm = [tree(1, 1, 1.4, 3.0)]
    table = equal_cost_table(found, {0.0: TREES, 1.0: warm}, {"T 0": 0.0, "T 1": 1.0, "T 1, less": 1.0})
    assert table[1] == [
        "head",
        "2.00 (9.5 ms) : 2.60 (8 nodes, depth 4, 9.0 ms)",
        "1.90 (9.5 ms) : 1.40 (1 node, depth 1, 3.0 ms)",
        "1.20 (2.0 ms) : none is as cheap",
    ]
