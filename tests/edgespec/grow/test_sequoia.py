"""Sequoia's programme against brute force over all trees."""

import itertools
import math
import time

import pytest
import torch

from edgespec.errors import EdgespecError
from edgespec.grow.network import rounded
from edgespec.grow.sequoia import best_limits, best_shape, sequoia_table
from edgespec.tree.shapes import TreeShape, from_paths

Ranks = tuple[int, ...]


def all_trees(size: int, *, depth: int, width: int) -> set[frozenset[Ranks]]:
    """Every set of at most `size` ways of ranks that is a tree."""
    trees: set[frozenset[Ranks]] = {frozenset()}
    found = set(trees)
    for _ in range(size):
        trees = {
            tree | {(*parent, rank)}
            for tree in trees
            for parent in ((), *tree)
            for rank in range(width)
            if len(parent) < depth and (*parent, rank) not in tree and (rank == 0 or (*parent, rank - 1) in tree)
        }
        found |= trees
    return found


def expected(ranks: frozenset[Ranks], acceptance: list[float]) -> float:
    return 1 + sum(math.prod(acceptance[rank] for rank in path) for path in ranks)


def tokens_of(shape: TreeShape, acceptance: list[float]) -> float:
    values = [1.0]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        values.append(values[parent] * acceptance[rank])
    return sum(values)


@pytest.mark.parametrize("layer_s", [0.0, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("node_s", [0.001, 0.1])
def test_the_best_limits_are_of_most_tokens_a_second(layer_s: float, node_s: float) -> None:
    """Against a loop over all sizes and depths, with passes that jump at 8 nodes."""
    acceptance, most = [0.6, 0.2, 0.1], 20
    table = sequoia_table(acceptance, size=most, depth=9, max_children=3)

    def seconds(size: int, depth: int) -> float:
        return 1 + node_s * size + (size > 8) * 0.3 + layer_s * depth

    speeds = {
        (size, depth): table.expected_tokens(size, depth) / seconds(size, depth)
        for depth in range(1, 9)  # fewer than the table has
        for size in range(1, most + 1)
    }
    every = torch.tensor([[seconds(size, depth) for size in range(1, most + 1)] for depth in range(1, 9)]).double()
    size, depth = best_limits(table, every)
    assert speeds[size, depth] == pytest.approx(max(speeds.values()), rel=1e-6)
    if layer_s > 0:
        assert table.shape(size, depth).depth == depth, "no layer is paid for that the tree has not"


def random_acceptance(seed: int, width: int) -> list[float]:
    """Not sorted: a later rank may be the better one."""
    rates = torch.rand(width + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    return [rate / sum(rates) for rate in rates[:width]]


@pytest.mark.parametrize(("size", "depth", "width"), [(1, 1, 1), (4, 2, 3), (5, 4, 3), (6, 3, 2), (6, 6, 2)])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_best_of_all_trees(seed: int, size: int, depth: int, width: int) -> None:
    acceptance = random_acceptance(seed, width)
    best = max(expected(tree, acceptance) for tree in all_trees(size, depth=depth, width=width))
    table = sequoia_table(acceptance, size=size, depth=depth, max_children=width)
    assert table.expected_tokens(size, depth) == pytest.approx(best, rel=1e-12)
    shape = table.shape(size, depth)
    assert shape.num_nodes - 1 <= size
    assert shape.depth <= depth
    assert max(shape.ranks) < width
    assert tokens_of(shape, acceptance) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("acceptance", [[0.1, 0.3, 0.5], [0.0, 0.2, 0.7], [0.3, 0.0, 0.6]])
def test_a_poor_first_rank_is_paid_for_only_where_a_later_one_is_worth_it(acceptance: list[float]) -> None:
    for size in range(1, 7):
        best = max(expected(tree, acceptance) for tree in all_trees(size, depth=3, width=3))
        table = sequoia_table(acceptance, size=size, depth=3, max_children=3)
        assert table.expected_tokens(size, 3) == pytest.approx(best, rel=1e-12)
        if best > 1:
            assert tokens_of(table.shape(size, 3), acceptance) == pytest.approx(best, rel=1e-12)


def test_a_tree_that_gains_nothing_is_refused() -> None:
    with pytest.raises(EdgespecError, match="gains a token"):
        best_shape((0.0, 0.0), size=4, depth=2, max_children=2)
    with pytest.raises(EdgespecError, match="1 nodes"):
        best_shape((0.0, 0.5), size=1, depth=2, max_children=2)


def test_one_table_serves_all_sizes_and_depths() -> None:
    acceptance = random_acceptance(3, 4)
    table = sequoia_table(acceptance, size=40, depth=8, max_children=4)
    for size, depth in itertools.product([1, 7, 40], [1, 3, 8]):
        assert table.shape(size, depth) == best_shape(tuple(acceptance), size=size, depth=depth, max_children=4)


def test_sure_drafts_make_a_chain_and_poor_ones_a_bush() -> None:
    assert best_shape((0.95, 0.01), size=8, depth=8, max_children=2).depth == 8
    assert best_shape((0.2, 0.2, 0.2, 0.2), size=4, depth=4, max_children=4).depth == 1


@pytest.mark.parametrize("acceptance", [[0.5 * 0.5**rank for rank in range(16)], [0.9, *[0.1 / 15] * 15]])
def test_the_largest_table_is_made_quickly(acceptance: list[float]) -> None:
    started = time.perf_counter()
    table = sequoia_table(acceptance, size=768, depth=24, max_children=16)
    assert time.perf_counter() - started < 10
    assert table.shape(768, 24).num_nodes == 769


@pytest.mark.parametrize("acceptance", [[], [0.9, 0.2], [-0.1, 0.5], [math.nan]])
def test_what_is_no_acceptance_is_refused(acceptance: list[float]) -> None:
    with pytest.raises(EdgespecError, match="acceptance by rank"):
        sequoia_table(acceptance, size=4, depth=2, max_children=4)


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_that_adds_up_to_one_may_be_rounded_as_files_round_it(seed: int) -> None:
    exact = torch.rand(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rates = rounded({"rates": (exact / exact.sum()).tolist()})["rates"]
    assert sequoia_table(rates, size=4, depth=2, max_children=9).expected_tokens(4, 2) > 1


def test_shapes_by_paths_are_those_of_the_programme() -> None:
    acceptance = [0.6, 0.2]
    best = max(all_trees(4, depth=3, width=2), key=lambda tree: expected(tree, acceptance))
    shape = best_shape(tuple(acceptance), size=4, depth=3, max_children=2)
    assert tokens_of(shape, acceptance) == pytest.approx(tokens_of(from_paths(sorted(best)), acceptance))
