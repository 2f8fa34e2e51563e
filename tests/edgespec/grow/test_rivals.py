"""Trees that grow beside looked up nodes: the best of both, found with fewer draft calls."""

import random
from collections.abc import Iterable, Sequence

import pytest
import torch

from edgespec.draft.lookup import LookedUp
from edgespec.grow.batched import grow_batched, one_by_one
from edgespec.grow.beam import BeamRule
from edgespec.grow.merged import Merged
from edgespec.grow.selection import Selection
from edgespec.tree.token_tree import TokenTree
from tests.edgespec.grow.tables import paths_of
from tests.edgespec.grow.test_batched import DEPTH, VOCAB, QOf, beam
from tests.edgespec.grow.test_best_first import FunctionDrafter, Path, random_q

SURE = 0.97


def candidates(count: int, seed: int) -> list[LookedUp]:
    """Looked up nodes of random chances: a chain, and some elsewhere."""
    rng, found, paths = random.Random(seed), list[LookedUp](), list[Path]()
    for number in range(count):
        parent = len(found) - 1 if number < count // 2 else rng.randrange(-1, len(found))
        above = () if parent < 0 else paths[parent]
        left = (1.0 if parent < 0 else found[parent].chance) - sum(one.chance for one in found if one.parent == parent)
        path = (*above, rng.randrange(VOCAB))
        if len(above) < DEPTH and path not in paths:
            paths.append(path)
            found.append(LookedUp(parent, path[-1], left * rng.uniform(0.5, 0.99), len(path)))
    return found


def last_of_best(scores: Iterable[float], size: int) -> float:
    """The last of the best so many; 0 where there are fewer."""
    return sorted([*scores, *(0.0,) * size], reverse=True)[size - 1]


def best_of_both(q_of: QOf, looked_up: Sequence[LookedUp], size: int) -> tuple[set[Path], int]:
    """The draft's nodes among the best of both, and its calls: the rule of `rivals.py`, node by node."""
    places: list[Path] = []
    for one in looked_up:
        places.append((*(() if one.parent < 0 else places[one.parent]), one.token))
    found = {path: one.chance for path, one in zip(places, looked_up, strict=True)}
    left = {
        path: 1 - sum(found[other] for other in places if other[:-1] == path and len(other) == len(path) + 1) / chance
        for path, chance in found.items()
    }
    drafted: dict[Path, float] = {(): 1.0}
    layer, calls, least = [()], 0, last_of_best(found.values(), size)
    for depth in range(1, DEPTH + 1):
        calls += bool(layer)
        new = {}
        for above in layer:
            row = q_of(above)
            for token in row.argsort(descending=True).tolist()[:size]:
                path = (*above, token)
                score = min(max(drafted[above] * float(row[token]), found.get(path, 0.0)), drafted[above])
                if score > least:
                    new[path] = score
        drafted |= new
        least = last_of_best((found | {path: score for path, score in drafted.items() if path}).values(), size)
        layer = [path for path, score in new.items() if score * left.get(path, 1.0) > least and depth < DEPTH]
    return {path for path, score in drafted.items() if path and score >= least}, calls


def grow(
    drafts: Sequence[QOf], looked_up: Sequence[Sequence[LookedUp]], sizes: Sequence[int], *, are_rivals: bool
) -> tuple[list[TokenTree], list[int]]:
    """The trees of the best nodes of both, and the draft calls that they took."""
    drafters = [FunctionDrafter(q_of) for q_of in drafts]
    growths = [
        Merged(
            drafted=beam(size=size, rivals=found if are_rivals else ()),
            looked_up=found,
            num_to_take=lambda chances, _, size=size: min(size, len(chances)),
        )
        for size, found in zip(sizes, looked_up, strict=True)
    ]
    trees = grow_batched(list(zip(growths, drafters, strict=True)), one_by_one)
    return [tree for tree in trees if isinstance(tree, TokenTree)], [drafter.num_calls for drafter in drafters]


@pytest.mark.parametrize("seed", range(60))
def test_the_draft_grows_what_is_among_the_best_of_both(seed: int) -> None:
    num_texts = 1 + seed % 3
    drafts = [random_q(VOCAB, 1.0 + 0.7 * (text + seed % 4), 10 * seed + text) for text in range(num_texts)]
    sizes = [3 + (seed + text) % 8 for text in range(num_texts)]
    looked_up = [candidates(8 - 3 * text, seed) for text in range(num_texts)]
    beams = [beam(size=size, rivals=found) for size, found in zip(sizes, looked_up, strict=True)]
    drafters = [FunctionDrafter(q_of) for q_of in drafts]
    trees = grow_batched(list(zip(beams, drafters, strict=True)), one_by_one)
    for tree, drafter, q_of, found, size in zip(trees, drafters, drafts, looked_up, sizes, strict=True):
        assert isinstance(tree, TokenTree)
        assert (set(paths_of(tree)), drafter.num_calls) == best_of_both(q_of, found, size)


@pytest.mark.parametrize("seed", range(20))
def test_both_fill_the_tree(seed: int) -> None:
    """A token that both have is one node, so that as many others have a place."""
    size = 4 + seed % 8
    (tree,), _ = grow([random_q(VOCAB, 2.0, seed)], [candidates(9, seed)], [size], are_rivals=True)
    assert tree.num_nodes == size + 1
    assert len(set(paths_of(tree))) == size


def test_below_a_sure_copy_the_draft_is_not_called() -> None:
    def q_of(_path: Path) -> torch.Tensor:
        return torch.tensor([SURE, *((1 - SURE) / 3,) * 3], dtype=torch.float64)

    copy = [LookedUp(layer - 1, 0, SURE ** (layer + 1), layer + 1) for layer in range(DEPTH)]
    (tree,), calls = grow([q_of], [copy], [DEPTH], are_rivals=True)
    _, calls_apart = grow([q_of], [copy], [DEPTH], are_rivals=False)
    assert (calls, calls_apart) == ([1], [DEPTH])
    assert paths_of(tree) == [(0,) * layer for layer in range(1, DEPTH + 1)]


def test_the_draft_goes_on_below_what_was_looked_up() -> None:
    """It gives the looked up token little by itself, and is sure of what follows that token."""

    def q_of(path: Path) -> torch.Tensor:
        row = [0.4, 0.3, 0.1, 0.2] if not path else [0.01, 0.01, 0.01, 0.97]
        return torch.tensor(row, dtype=torch.float64)

    (tree,), _ = grow([q_of], [[LookedUp(-1, 3, 0.95, 1)]], [3], are_rivals=True)
    assert paths_of(tree) == [(3,), (3, 3), (3, 3, 3)]


def test_a_looked_up_token_has_its_chance_whatever_the_rule_makes_of_it() -> None:
    rule = BeamRule(score=lambda layer: 0.1 * layer.values[:, None] * layer.q_drawn)
    found = [LookedUp(-1, 1, 0.8, 1), LookedUp(0, 2, 0.3, 2)]
    q_of = random_q(VOCAB, 0.1, 5)
    (tree,) = grow_batched([(beam(size=4, rule=rule, rivals=found), FunctionDrafter(q_of))], one_by_one)
    assert isinstance(tree, TokenTree)
    assert dict(zip(paths_of(tree), tree.scores.tolist()[1:], strict=True))[1,] == pytest.approx(0.8)


def test_rivals_take_places_until_they_are_withdrawn() -> None:
    like = torch.zeros(0, dtype=torch.float64)
    rivals = torch.tensor([0.9, 0.8, 0.7], dtype=torch.float64), torch.tensor([0, 0, 0])
    selection = Selection([3], 3, like=like, rivals=rivals)
    assert selection.least.tolist() == [0.7]
    selection.withdraw(torch.tensor([1, 3]))  # 3 stands for none
    selection.add(torch.tensor([0.75, 0.6], dtype=torch.float64), torch.tensor([0, 0]))
    assert selection.least.tolist() == [0.7]
    assert selection.selected().tolist() == [0, 1]
    assert selection.scores.tolist() == [torch.inf, 0.75, 0.6]
    assert float(selection.gains()[0]) == pytest.approx(0.75 - 0.8)


def test_a_beam_without_rivals_is_as_it_was() -> None:
    q_of = random_q(VOCAB, 1.5, 3)
    (tree,), _ = grow([q_of], [[]], [9], are_rivals=True)
    (same,) = grow_batched([(beam(size=9), FunctionDrafter(q_of))], one_by_one)
    assert isinstance(same, TokenTree)
    assert paths_of(tree) == paths_of(same)
