"""Beams that grow together: the best nodes of all trees, against brute force; with room for all, the same trees."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edgespec.draft.distributions import Distributions
from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import default_acceptance
from edgespec.grow.adaptive import adaptive_rule
from edgespec.grow.batched import Expansion, grow_batched, grown, one_by_one
from edgespec.grow.beam import Beam, BeamRule
from edgespec.grow.c2t import c2t_rule
from edgespec.grow.classifier import default_classifier
from edgespec.grow.eagle2 import eagle2_rule
from edgespec.grow.opt_tree import OPT_TREE_RULE
from edgespec.grow.selection import rank_within
from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree
from tests.edgespec.grow.tables import paths_of
from tests.edgespec.grow.test_best_first import FunctionDrafter, Path, random_q
from tests.support.launches import Launches

CPU = torch.device("cpu")
VOCAB, DEPTH = 4, 4
QOf = Callable[[Path], Tensor]


def beam(**limits: Any) -> Beam:
    return Beam(
        **{"root": 0, "rule": OPT_TREE_RULE, "draw": "coupled", "size": 9, "depth": DEPTH, "device": CPU, **limits}
    )


def drafts(count: int, seed: int) -> list[QOf]:
    """Texts of which some are surer than others."""
    return [random_q(VOCAB, 0.5 + number, 100 * seed + number) for number in range(count)]


def grow(beams: Sequence[Beam], q_of: Sequence[QOf], expand: Any = one_by_one) -> list[TokenTree]:
    growths = [(beam, FunctionDrafter(found)) for beam, found in zip(beams, q_of, strict=True)]
    trees = [tree for tree in grow_batched(growths, expand) if isinstance(tree, TokenTree)]
    assert len(trees) == len(beams)
    return trees


def assert_equal(found: TokenTree, expected: TokenTree) -> None:
    for name in ("tokens", "parents", "ranks", "draft_rows"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.scores, expected.scores)


def chance(q_of: QOf, path: Path) -> float:
    return math.prod(float(q_of(path[:index])[token]) for index, token in enumerate(path))


def best_of_all(q_of: Sequence[QOf], sizes: Sequence[int], budget: int, *, depth: int = DEPTH) -> list[set[Path]]:
    """All paths of all texts: of each text the likeliest, and of these the likeliest of all."""
    nodes: list[tuple[float, int, Path]] = []
    for text, (found, size) in enumerate(zip(q_of, sizes, strict=True)):
        paths = [path for length in range(1, depth + 1) for path in itertools.product(range(VOCAB), repeat=length)]
        chances = {path: chance(found, path) for path in paths}
        own = sorted(paths, key=lambda path: -chances[path])[:size]
        nodes += [(chances[path], text, path) for path in own]
    kept = sorted(nodes, reverse=True)[:budget]
    return [{path for _, of, path in kept if of == text} for text in range(len(q_of))]


def assert_best_of_all(seed: int, sizes: Sequence[int], shares: Sequence[int]) -> None:
    q_of = drafts(len(sizes), seed)
    beams = [beam(size=size, share=share) for size, share in zip(sizes, shares, strict=True)]
    assert [set(paths_of(tree)) for tree in grow(beams, q_of)] == best_of_all(q_of, sizes, sum(shares))


COMPANIES = [
    ([30, 30, 30], [4, 4, 4]),  # the budget alone decides
    ([6, 6, 6], [4, 4, 4]),  # some trees are as large as they may be
    ([2, 40, 9, 1], [1, 20, 3, 1]),
    ([7, 9], [7, 9]),  # no tree can have more than its share
    ([64], [5]),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("sizes", "shares"), COMPANIES)
def test_the_nodes_are_the_best_of_all_trees(seed: int, sizes: list[int], shares: list[int]) -> None:
    assert_best_of_all(seed, sizes, shares)


def all_rules() -> dict[str, BeamRule]:
    return {
        "adaptive": adaptive_rule(default_acceptance()),
        "opt-tree": OPT_TREE_RULE,
        "eagle2": eagle2_rule(width=3, stop_depths=frozenset({2}), stop_log_probability=-0.4),
        "c2t": c2t_rule(default_classifier(), width=3),
    }


@pytest.mark.parametrize("keeps_draft_probs", [False, True])
@pytest.mark.parametrize("name", all_rules())
@pytest.mark.parametrize("seed", range(4))
def test_where_the_budget_has_room_for_all_a_tree_is_that_grown_alone(
    seed: int, name: str, *, keeps_draft_probs: bool
) -> None:
    """Whatever the limits of the others, the layers of their trees, and the order in which they stand."""
    rule = all_rules()[name]
    limits: list[dict[str, Any]] = [
        {"size": 8},
        {"size": 3, "depth": 1, "temperature": 0.7, "noise": 5},
        {"size": 12, "threshold": 0.02, "max_children": 2, "temperature": 1.0, "noise": 6},
        {"size": 20, "stop_gain": 0.5},
        {"size": 7, "depth": 0},
        {"size": 15, "depth": 2, "noise": 7},
    ]
    for one in limits:
        if "noise" in one:
            one["noise"] = TextNoise(seed=seed, key=one["noise"], vocab=VOCAB, device=CPU)
    q_of = drafts(len(limits), seed)
    beams = [beam(**{"rule": rule, "max_children": 4, "keeps_draft_probs": keeps_draft_probs, **one}) for one in limits]
    alone = [grown(one, FunctionDrafter(found)) for one, found in zip(beams, q_of, strict=True)]
    assert len({tree.num_nodes for tree in alone}) > 2
    order = torch.randperm(len(beams), generator=torch.Generator().manual_seed(seed)).tolist()
    together = grow([beams[place] for place in order], [q_of[place] for place in order])
    for place, tree in zip(order, together, strict=True):
        if beams[place].depth:
            assert_equal(tree, alone[place])
        assert (tree.draft_probs is not None) == (keeps_draft_probs and beams[place].depth > 0)
        if tree.draft_probs is not None:
            assert torch.equal(tree.draft_probs, alone[place].draft_probs)


@pytest.mark.parametrize("seed", range(8))
def test_under_a_shared_budget_layers_follow_while_they_pay_for_all_together(seed: int) -> None:
    """A layer is one draft call for all: that it pays for one of them is not enough."""
    q_of, sizes, shares, stop_gain = drafts(3, seed), [20, 20, 20], [6, 6, 6], 0.3
    gain = expected = 0.0
    for depth in range(1, DEPTH + 1):
        best = best_of_all(q_of, sizes, sum(shares), depth=depth)
        chances = [chance(found, path) for found, paths in zip(q_of, best, strict=True) for path in paths]
        gain, expected = sum(chances) - expected, sum(chances)
        if gain < 3 * stop_gain:
            break
    beams = [beam(size=20, share=6, stop_gain=stop_gain)] * 3
    assert [set(paths_of(tree)) for tree in grow(beams, q_of)] == best


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_of_its_own_size_is_none_of_those_that_share_a_budget(seed: int) -> None:
    """A text that is not tuned may depend on its tree, which must not depend on who is beside it."""
    q_of, own = drafts(4, seed), beam(size=9)
    shared = beam(size=30, share=3)
    trees = grow([shared, own, shared, own], q_of)
    for place in (1, 3):
        assert_equal(trees[place], grown(own, FunctionDrafter(q_of[place])))
    assert [set(paths_of(trees[place])) for place in (0, 2)] == best_of_all([q_of[0], q_of[2]], [30, 30], 6)


def test_a_layer_is_one_round_of_asking_whatever_the_rules() -> None:
    rounds: list[int] = []

    def expand(expansions: Sequence[Expansion]) -> Sequence[Distributions | EdgespecError]:
        rounds.append(len(expansions))
        return one_by_one(expansions)

    beams = [beam(rule=rule, max_children=3, depth=3) for rule in all_rules().values() for _ in range(2)]
    grow(beams, drafts(len(beams), 1), expand)
    assert len(rounds) == 3
    assert rounds[0] == len(beams)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_text_whose_draft_fails_leaves_the_trees_of_the_others_as_they_are(at: int) -> None:
    q_of, beams = drafts(3, 2), [beam(size=30, share=6, depth=4)] * 3
    expected = grow([beams[0], beams[2]], [q_of[0], q_of[2]])
    calls = 0

    def failing(path: Path) -> Tensor:
        nonlocal calls
        calls += len(path) == at - 1
        if calls:
            raise EdgespecError("E_NAN_LOGITS", "no numbers.", "Try another.")
        return q_of[1](path)

    growths = [(one, FunctionDrafter(found)) for one, found in zip(beams, [q_of[0], failing, q_of[2]], strict=True)]
    first, failed, last = grow_batched(growths, one_by_one)
    assert isinstance(failed, EdgespecError)
    for found, right in zip((first, last), expected, strict=True):
        assert isinstance(found, TokenTree)
        assert_equal(found, right)


@given(nodes=st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 2)), min_size=1, max_size=12))
def test_places_are_counted_within_a_text_and_ties_go_to_the_first(nodes: list[tuple[float, int]]) -> None:
    scores, texts = (torch.tensor(column) for column in zip(*nodes, strict=True))
    expected = [
        sum(
            other_text == text and (other > score or (other == score and index < place))
            for index, (other, other_text) in enumerate(nodes)
        )
        for place, (score, text) in enumerate(nodes)
    ]
    assert rank_within(scores, texts, 3).tolist() == expected


def test_trees_of_several_texts_wait_for_the_device_three_times_a_layer() -> None:
    """For a layer's width, for how many nodes are expanded, and for how many of them each text has."""
    beams, q_of = [beam(size=3, depth=DEPTH) for _ in range(3)], drafts(3, 1)
    with Launches() as launches:
        grow(beams, q_of)
    assert launches.by_name["aten::nonzero"] <= 2 * DEPTH + 1
    assert not launches.by_name["aten::bincount"], "it waits by itself for the largest number"
