"""Chosen children: the layered engine against brute force over all subtrees and all paths."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from edgespec.grow.batched import grown
from edgespec.grow.beam import Beam, BeamRule, Candidates, by_path_probability
from edgespec.grow.c2t import c2t_rule
from edgespec.grow.classifier import Classifier, default_classifier
from edgespec.grow.eagle2 import eagle2_rule
from edgespec.grow.opt_tree import OPT_TREE_RULE
from edgespec.train.collect import classifier_settings
from edgespec.tree.token_tree import TokenTree, depths
from tests.edgespec.grow.tables import paths_of
from tests.edgespec.grow.test_best_first import FunctionDrafter, Path, random_q

CPU = torch.device("cpu")
VOCAB = 4


def grow(
    q_of: Callable[[Path], Tensor], rule: BeamRule, *, size: int, depth: int, width: int = VOCAB, **limits: float
) -> TokenTree:
    beam = Beam(
        root=0, rule=rule, draw="chosen", size=size, depth=depth, max_children=width, device=CPU,
        **limits,
    )  # fmt: skip
    return grown(beam, FunctionDrafter(q_of))


def probability(q_of: Callable[[Path], Tensor], path: Path) -> float:
    return math.prod(float(q_of(path[:index])[token]) for index, token in enumerate(path))


def all_paths(depth: int) -> list[Path]:
    return [path for length in range(1, depth + 1) for path in itertools.product(range(VOCAB), repeat=length)]


@pytest.mark.parametrize("seed", range(20))
def test_opt_tree_is_the_best_subtree_of_all(seed: int) -> None:
    """Theorem 3.1: brute force over every connected set of `size` nodes, not only over the likeliest paths."""
    q_of, size = random_q(VOCAB, 1.5, seed), 4
    best = 0.0
    frontier: set[frozenset[Path]] = {frozenset()}
    for _ in range(size):
        frontier = {
            nodes | {(*parent, token)}
            for nodes in frontier
            for parent in ((), *nodes)
            for token in range(VOCAB)
            if (*parent, token) not in nodes and len(parent) < 3
        }
    best = max(sum(probability(q_of, path) for path in nodes) for nodes in frontier)
    tree = grow(q_of, OPT_TREE_RULE, size=size, depth=3)
    assert sum(probability(q_of, path) for path in paths_of(tree)) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("size", [1, 7, 30])
def test_opt_tree_keeps_the_likeliest_paths(seed: int, size: int) -> None:
    q_of = random_q(VOCAB, 2.0, seed)
    tree = grow(q_of, OPT_TREE_RULE, size=size, depth=4)
    expected = sorted(all_paths(4), key=lambda path: -probability(q_of, path))[:size]
    assert set(paths_of(tree)) == set(expected)
    assert tree.draw == "chosen"


@pytest.mark.parametrize("seed", range(10))
def test_opt_tree_stops_when_a_layer_gains_less_than_delta(seed: int) -> None:
    q_of, size, delta = random_q(VOCAB, 2.0, seed), 12, 0.3
    expected_acceptance, depth = 0.0, 0
    for depth in range(1, 7):
        best = sorted((probability(q_of, path) for path in all_paths(depth)), reverse=True)[:size]
        gain, expected_acceptance = sum(best) - expected_acceptance, sum(best)
        if gain < delta:
            break
    tree = grow(q_of, OPT_TREE_RULE, size=size, depth=6, stop_gain=delta)
    reference = grow(q_of, OPT_TREE_RULE, size=size, depth=depth)
    assert paths_of(tree) == paths_of(reference)


def literal_eagle2(q_of: Callable[[Path], Tensor], *, width: int, depth: int, size: int) -> list[set[Path]]:
    """EAGLE-2 as published: all candidates of all layers, the reranked tree of every depth."""
    beam: list[Path] = [()]
    candidates: list[Path] = []
    trees = []
    for _ in range(depth):
        layer = [(*path, token) for path in beam for token in q_of(path).topk(width).indices.tolist()]
        candidates += layer
        beam = sorted(layer, key=lambda path: -probability(q_of, path))[:width]
        trees.append(set(sorted(candidates, key=lambda path: -probability(q_of, path))[:size]))
    return trees


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("width", "size"), [(2, 5), (3, 8), (2, 100)])
def test_eagle2_reranks_to_the_literal_algorithms_connected_tree(seed: int, width: int, size: int) -> None:
    q_of = random_q(VOCAB, 1.5, seed)
    tree = grow(q_of, eagle2_rule(width=width), size=size, depth=5, width=width)
    assert set(paths_of(tree)) == literal_eagle2(q_of, width=width, depth=5, size=size)[-1]


def test_a_tree_to_learn_from_holds_all_that_eagle2_drafts() -> None:
    (setting,) = classifier_settings(temperatures=[0.0])
    assert (setting.tree.num_nodes, setting.tree.num_layers) == (10 + 10 * 100, 11), "C2T, appendix B.1"
    q_of = random_q(VOCAB, 1.5, 0)
    tree = replace(setting.tree, depth=4, max_children=3)
    found = grow(q_of, eagle2_rule(width=3), size=tree.num_nodes, depth=4, width=3)
    assert set(paths_of(found)) == literal_eagle2(q_of, width=3, depth=4, size=1000)[-1]
    assert found.num_nodes - 1 == tree.num_nodes == 30


@pytest.mark.parametrize("seed", range(10))
def test_dynamic_depth_stops_where_the_beam_is_unlikely(seed: int) -> None:
    q_of, width = random_q(VOCAB, 1.0, seed), 2
    literal = literal_eagle2(q_of, width=width, depth=6, size=100)
    beam: list[Path] = [()]
    expected = literal[-1]
    for depth in range(1, 7):
        layer = [(*path, token) for path in beam for token in q_of(path).topk(width).indices.tolist()]
        beam = sorted(layer, key=lambda path: -probability(q_of, path))[:width]
        if depth in {2, 4} and math.log(sum(probability(q_of, path) for path in beam)) < -0.7:
            expected = literal[depth - 1]
            break
    rule = eagle2_rule(width=width, stop_depths=frozenset({2, 4}), stop_log_probability=-0.7)
    assert set(paths_of(grow(q_of, rule, size=100, depth=6, width=width))) == expected


@pytest.mark.parametrize("seed", range(10))
def test_a_threshold_keeps_the_paths_above_it(seed: int) -> None:
    """C2T with a confidence that is the path probability."""
    q_of = random_q(VOCAB, 1.5, seed)
    tree = grow(q_of, BeamRule(score=by_path_probability), size=700, depth=5, threshold=0.05)
    assert set(paths_of(tree)) == {path for path in all_paths(5) if probability(q_of, path) >= 0.05}


@pytest.mark.parametrize("seed", range(10))
def test_layers_are_as_wide_as_the_rule_allows(seed: int) -> None:
    rule = BeamRule(score=by_path_probability, layer_nodes=3, layer_expanded=2)
    tree = grow(random_q(VOCAB, 0.5, seed), rule, size=700, depth=4)
    assert depths(tree.parents).bincount()[1:].tolist() == [3, 3, 3, 3]
    assert depths(tree.parents)[tree.draft_rows >= 0].bincount()[1:].tolist() == [2, 2, 2]


def test_a_score_that_grows_downwards_still_makes_a_tree() -> None:
    def deeper_is_better(layer: Candidates) -> Tensor:
        return layer.q_drawn * layer.depth

    tree = grow(random_q(VOCAB, 1.0, 3), BeamRule(score=deeper_is_better), size=9, depth=4)
    assert tree.num_nodes == 10
    paths_of(tree)


class PathProbability(Classifier):
    """A classifier that says what the draft says."""

    def confidence(self, *, path_probability: Tensor, entropy: Tensor, depth: int) -> Tensor:
        assert entropy.shape == path_probability.shape[:1]
        return path_probability


@pytest.mark.parametrize("seed", range(10))
def test_c2t_with_the_draft_for_a_classifier_is_a_threshold_on_paths(seed: int) -> None:
    q_of, confidence = random_q(VOCAB, 1.5, seed), 0.05
    rule = c2t_rule(PathProbability(network=default_classifier().network), width=1000)
    tree = grow(q_of, rule, size=700, depth=5, threshold=confidence)
    assert set(paths_of(tree)) == {path for path in all_paths(5) if probability(q_of, path) >= confidence}


@pytest.mark.parametrize("seed", range(10))
def test_c2ts_second_pruning_keeps_the_most_confident_of_a_layer(seed: int) -> None:
    rule = c2t_rule(PathProbability(network=default_classifier().network), width=3)
    q_of = random_q(VOCAB, 1.0, seed)
    expected: set[Path] = set()
    layer: list[Path] = [()]
    for _ in range(4):
        candidates = [(*path, token) for path in layer for token in range(VOCAB)]
        layer = sorted(candidates, key=lambda path: -probability(q_of, path))[:3]
        layer = [path for path in layer if probability(q_of, path) >= 0.001]
        expected |= set(layer)
    assert set(paths_of(grow(q_of, rule, size=700, depth=4, threshold=0.001))) == expected
