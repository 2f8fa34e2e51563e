"""Layered growth against a literal heap: DySpec's Algorithm 1, one token at a time."""

import heapq
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.grow import best_first
from edgespec.grow.batched import grown
from edgespec.grow.best_first import grow_best_first
from edgespec.grow.dyspec import predict_slots
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree, depths
from tests.edgespec.grow.tables import paths_of

CPU = torch.device("cpu")
ROOT = 0
Path = tuple[int, ...]


class FunctionDrafter:
    """A drafter whose q is a function of the path of tokens below the root, root excluded."""

    def __init__(self, q_of: Callable[[Path], Tensor]) -> None:
        self.q_of = q_of
        self.paths: list[Path] = []
        self.num_calls = 0

    def begin(self, ids: Sequence[int]) -> None:
        self.rewind()

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        self.num_calls += 1
        new = [
            () if parent < 0 else (*self.paths[parent], token)
            for token, parent in zip(tokens.tolist(), parent_rows.tolist(), strict=True)
        ]
        self.paths += new
        return torch.stack([self.q_of(path) for path in new])

    def rewind(self) -> None:
        self.paths = []

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        self.paths = []


def random_q(vocab: int, sharpness: float, seed: int) -> Callable[[Path], Tensor]:
    def q_of(path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
        logits = torch.randn(vocab, generator=generator, dtype=torch.float64) * sharpness
        return logits.softmax(-1)

    return q_of


def draws_of(q_of: Callable[[Path], Tensor], seed: int) -> Callable[[Path, int], list[int]]:
    """The tokens drawn below a path, in order: the noise is a function of the path, so both algorithms see it."""

    def draw(path: Path, count: int) -> list[int]:
        q = q_of(path)
        generator = torch.Generator().manual_seed(hash((seed, 7, *path)) % 2**31)
        noise = torch.rand(q.shape[0], dtype=torch.float64, generator=generator).log().neg()
        order: list[int] = (q / noise).sort(descending=True).indices.tolist()
        return [token for token in order if q[token] > 0][:count]

    return draw


def grow(
    drafter: FunctionDrafter,
    draw: Callable[[Path, int], list[int]] | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    vocab: int,
    size: int,
    depth: int = 10_000,
    threshold: float = 0.0,
    max_children: int = 8,
) -> TokenTree:
    if draw is not None:
        # Rows of the last expansion are the paths drawn below now.
        def drawn(q: Tensor, count: int, _generator: torch.Generator) -> tuple[Tensor, Tensor]:
            rows = [draw(path, min(count, vocab)) for path in drafter.paths[-q.shape[0] :]]
            width = min(count, vocab)
            tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            real = torch.tensor([[index < len(row) for index in range(width)] for row in rows])
            return tokens, q.gather(-1, tokens) * real

        monkeypatch.setattr(best_first, "draw_without_replacement", drawn)
    growth = grow_best_first(
        ROOT,
        predict=predict_slots,
        size=size,
        depth=depth,
        threshold=threshold,
        max_children=max_children,
        draws=TextDraws(
            sampling=SamplingSettings(),
            device=CPU,
            generator=torch.Generator().manual_seed(0),
            noise=TextNoise(seed=0, key=0, vocab=1, device=CPU),
        ),
    )
    return grown(growth, drafter)


def heap_tree(
    q_of: Callable[[Path], Tensor],
    draw: Callable[[Path, int], list[int]],
    *,
    size: int,
    depth: int,
    threshold: float,
    max_children: int,
) -> set[Path]:
    """Algorithm 1 as printed, with the caps: the paths of the tree."""
    order = itertools.count()
    heap: list[tuple[float, int, Path, Tensor, int]] = [(-1.0, next(order), (), q_of(()), 0)]
    tree: set[Path] = set()
    while heap and len(tree) < size:
        negative, _, path, residual, rank = heapq.heappop(heap)
        value = -negative
        if value < threshold or value <= 0 or rank >= max_children or len(path) >= depth:
            continue
        tokens = draw(path, rank + 1)
        if len(tokens) <= rank:
            continue
        token = tokens[rank]
        tree.add((*path, token))
        chance = float(residual[token])
        residual = residual.clone()
        residual[token] = 0
        if residual.sum() > 0:
            residual = residual / residual.sum()
        heapq.heappush(heap, (-value * (1 - chance), next(order), path, residual, rank + 1))
        heapq.heappush(heap, (-value * chance, next(order), (*path, token), q_of((*path, token)), 0))
    return tree


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 120),
    vocab=st.integers(2, 12),
    sharpness=st.sampled_from([0.3, 1.0, 3.0]),
    depth=st.sampled_from([1, 3, 10_000]),
    threshold=st.sampled_from([0.0, 0.02]),
    max_children=st.sampled_from([1, 2, 12]),
)
def test_layered_growth_finds_the_heap_algorithms_tree(
    seed: int, size: int, vocab: int, sharpness: float, depth: int, threshold: float, max_children: int
) -> None:
    q_of = random_q(vocab, sharpness, seed)
    draw = draws_of(q_of, seed)
    limits = {"size": size, "depth": depth, "threshold": threshold, "max_children": max_children}
    with pytest.MonkeyPatch.context() as patch:
        tree = grow(FunctionDrafter(q_of), draw, patch, vocab=vocab, **limits)
    assert set(paths_of(tree)) == heap_tree(q_of, draw, **limits)


@pytest.mark.parametrize("size", [1, 2, 3, 16, 63, 64, 65, 256, 512, 768])
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_every_budget_up_to_768_gives_the_heap_algorithms_tree(
    size: int, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q_of = random_q(20, sharpness, size)
    draw = draws_of(q_of, size)
    drafter = FunctionDrafter(q_of)
    tree = grow(drafter, draw, monkeypatch, vocab=20, size=size, max_children=20)
    found = [(), *paths_of(tree)]
    assert set(found[1:]) == heap_tree(q_of, draw, size=size, depth=10_000, threshold=0.0, max_children=20)
    assert tree.num_nodes == size + 1
    # One draft call a layer: no more than the layers that were looked at.
    assert drafter.num_calls <= int(depths(tree.parents).max()) + 2


def test_a_tree_keeps_its_promises() -> None:
    """Parents first, siblings in draw order with rising ranks, q rows of the very distribution drawn from."""
    q_of = random_q(15, 1.0, 5)
    drafter = FunctionDrafter(q_of)
    with pytest.MonkeyPatch.context() as patch:
        tree = grow(drafter, None, patch, vocab=15, size=100)
    parents, ranks, rows = tree.parents.tolist(), tree.ranks.tolist(), tree.draft_rows.tolist()
    seen: dict[int, int] = {}
    for node, parent in enumerate(parents):
        assert parent < node
        if parent >= 0:
            assert ranks[node] == seen.get(parent, 0)
            seen[parent] = ranks[node] + 1
            assert rows[parent] >= 0
    for path, row in zip([(), *paths_of(tree)], rows, strict=True):
        if row >= 0:
            torch.testing.assert_close(tree.draft_probs[row], q_of(path))
    assert len(set(paths_of(tree))) == tree.num_nodes - 1


def test_a_certain_draft_gives_a_chain_as_deep_as_allowed() -> None:
    def q_of(path: Path) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(len(path) % 3), 3).double()

    with pytest.MonkeyPatch.context() as patch:
        tree = grow(FunctionDrafter(q_of), None, patch, vocab=3, size=64, depth=9)
    assert tree.parents.tolist() == list(range(-1, 9))
    assert tree.tokens.tolist() == [ROOT, 0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_no_layers_means_no_draft_call() -> None:
    drafter = FunctionDrafter(random_q(4, 1.0, 0))
    with pytest.MonkeyPatch.context() as patch:
        tree = grow(drafter, None, patch, vocab=4, size=8, depth=0)
    assert tree.num_nodes == 1
    assert drafter.num_calls == 0
