"""Verification rules against their literal statement."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.sampling.distribution import to_probs
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import accept_alone
from edgespec.verify.rejection import verify_rejection
from edgespec.verify.rows import TargetRows
from edgespec.verify.walk import verify_greedy, verify_membership


class DenseRows(TargetRows):
    """Rows whose distributions are known: p [n, vocab]."""

    is_near_tie = None  # rows of trees decide

    def __init__(self, p: Tensor) -> None:
        self.p = p

    def probs(self, node: int) -> Tensor:
        return self.p[node]

    def best(self, node: int) -> int:
        return int(self.p[node].argmax())

    def all_probs(self) -> Tensor:
        return self.p


def random_tree(generator: torch.Generator, *, nodes: int, vocab: int) -> TokenTree:
    """A tree of distinct siblings with a random q at every node."""
    parents, tokens, ranks = [-1], [0], [0]
    children: dict[int, list[int]] = {}
    while len(parents) < nodes:
        parent = int(torch.randint(len(parents), (1,), generator=generator))
        token = int(torch.randint(vocab, (1,), generator=generator))
        if token in children.setdefault(parent, []):
            continue
        parents.append(parent)
        tokens.append(token)
        ranks.append(len(children[parent]))
        children[parent].append(token)
    q = torch.randn(nodes, vocab, generator=generator, dtype=torch.float64).softmax(-1)
    return TokenTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        ranks=torch.tensor(ranks),
        draw="sampled",
        draft_rows=torch.arange(nodes),
        draft_probs=q,
    )


def literal_walk(tree: TokenTree, token_at: Callable[[int, int], int]) -> tuple[list[int], int]:
    """Where the tokens at every node and depth lead: the path, and the token without a node."""
    node, path = 0, []
    while True:
        token = token_at(node, len(path))
        below = [n for n in range(1, tree.num_nodes) if tree.parents[n] == node and tree.tokens[n] == token]
        if not below:
            return path, token
        node = below[0]
        path.append(node)


def literal_rejection(tree: TokenTree, p: Tensor, uniforms: Tensor) -> tuple[list[int], Tensor]:
    """DySpec's Algorithm 3 with uniform noise: the path, and the residual that the bonus token comes from."""
    node, path = 0, []
    while True:
        target, draft = p[node].clone(), tree.draft_probs[node].clone()
        moved = False
        for child in range(1, tree.num_nodes):
            if tree.parents[child] != node:
                continue
            token = int(tree.tokens[child])
            if uniforms[child] < target[token] / draft[token]:
                node, moved = child, True
                path.append(child)
                break
            target = (target - draft).clamp(min=0)
            target = target / target.sum()
            draft[token] = 0
            if draft.sum() <= 0:
                break
            draft = draft / draft.sum()
        if not moved:
            return path, target


@pytest.mark.parametrize("seed", range(30))
def test_greedy_follows_the_argmax(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, nodes=40, vocab=4)
    p = torch.rand(40, 4, generator=generator)
    acceptance = accept_alone(verify_greedy(tree, DenseRows(p), generator))
    path, bonus = literal_walk(tree, lambda node, _: int(p[node].argmax()))
    assert list(acceptance.path) == path
    assert acceptance.next_token == bonus


@pytest.mark.parametrize("seed", range(3, 63))  # at seed 3 the number of a later sibling decides
def test_rejection_takes_the_literal_algorithms_path(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, nodes=50, vocab=6)
    p = (torch.randn(50, 6, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)
    residuals: list[Tensor] = []

    def remember(probs: Tensor, _generator: torch.Generator) -> int:
        residuals.append(probs)
        return 0

    monkeypatch.setattr("edgespec.verify.rejection.draw_one", remember)
    acceptance = accept_alone(verify_rejection(tree, DenseRows(p), torch.Generator().manual_seed(seed)))
    uniforms = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    path, residual = literal_rejection(tree, p, uniforms)
    assert list(acceptance.path) == path
    torch.testing.assert_close(residuals[0] / residuals[0].sum(), residual)


def test_equal_distributions_are_always_accepted() -> None:
    """P = q leaves nothing to reject for, also when rounding says otherwise."""
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        q = torch.rand(1, 9, generator=generator).softmax(-1)
        token = int(torch.multinomial(q[0], 1, generator=generator))
        tree = TokenTree(
            tokens=torch.tensor([0, token]),
            parents=torch.tensor([-1, 0]),
            ranks=torch.tensor([0, 0]),
            draw="sampled",
            draft_rows=torch.tensor([0, -1]),
            draft_probs=q,
        )
        nearly = q * (1 + 1e-7 * (torch.rand(1, 9, generator=generator) - 0.5))
        assert accept_alone(verify_rejection(tree, DenseRows(torch.cat([nearly, nearly])), generator)).path == (1,)


def test_rejection_refuses_chosen_children_and_names_the_sound_pairs() -> None:
    tree = dataclasses.replace(random_tree(torch.Generator().manual_seed(0), nodes=4, vocab=5), draw="chosen")
    with pytest.raises(ValueError, match=r"membership.*chosen"):
        accept_alone(verify_rejection(tree, DenseRows(torch.rand(4, 5)), torch.Generator()))


def chosen(tree: TokenTree) -> TokenTree:
    return dataclasses.replace(tree, draw="chosen")


@pytest.mark.parametrize("seed", range(40))
def test_membership_goes_where_the_drawn_token_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = chosen(random_tree(torch.Generator().manual_seed(seed), nodes=40, vocab=4))
    p = torch.rand(40, 4, generator=torch.Generator().manual_seed(seed))
    drawn = torch.randint(4, (40,), generator=torch.Generator().manual_seed(seed)).tolist()

    def draw_token_of_node(probs: Tensor, _generator: torch.Generator) -> int:
        (node,) = (p == probs).all(1).nonzero().flatten().tolist()
        return drawn[node]

    monkeypatch.setattr("edgespec.verify.walk.draw_one", draw_token_of_node)
    acceptance = accept_alone(verify_membership(tree, DenseRows(p), torch.Generator()))
    assert (list(acceptance.path), acceptance.next_token) == literal_walk(tree, lambda node, _: drawn[node])


def test_membership_refuses_sampled_children_and_names_the_sound_pairs() -> None:
    tree = random_tree(torch.Generator().manual_seed(0), nodes=4, vocab=5)
    with pytest.raises(ValueError, match=r"sampled.*chosen"):
        accept_alone(verify_membership(tree, DenseRows(torch.rand(4, 5)), torch.Generator()))


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_rows_are_made_in_chunks_and_equal_the_whole(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(10, 6), torch.randn(6, 12)
    sizes: list[int] = []

    def head(some: Tensor) -> Tensor:
        sizes.append(some.shape[0])
        return some @ weight

    monkeypatch.setattr("edgespec.model.row_chunks.CHUNK_BYTES", chunk_rows * 12 * 4)
    sampling = SamplingSettings(temperature=0.7, top_p=0.9)
    rows = TargetRows(hidden, head, sampling, vocab=12)
    expected = to_probs(hidden @ weight, sampling)
    torch.testing.assert_close(rows.all_probs(), expected)
    torch.testing.assert_close(rows.probs(4), expected[4])
    assert [rows.best(node) for node in range(10)] == (hidden @ weight).argmax(-1).tolist()
    assert max(sizes) <= chunk_rows


def test_only_the_nodes_that_are_asked_about_go_through_the_head() -> None:
    """Below a root that is a leaf, 768 nodes cost nothing."""
    hidden = torch.randn(768, 6)
    rows_made = 0

    def head(some: Tensor) -> Tensor:
        nonlocal rows_made
        rows_made += some.shape[0]
        return some

    tree = random_tree(torch.Generator().manual_seed(3), nodes=768, vocab=600)
    rows = TargetRows(hidden, head, SamplingSettings(temperature=1), vocab=6)
    acceptance = accept_alone(verify_membership(chosen(tree), rows, torch.Generator().manual_seed(0)))
    assert rows_made == 1 + len(acceptance.path) < 20


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "ask", [lambda rows: rows.probs(1), lambda rows: rows.best(1), TargetRows.all_probs], ids=["one", "best", "all"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "minus-inf"])
def test_states_that_make_no_distribution_are_refused(
    value: float, ask: Callable[[TargetRows], Tensor], temperature: float
) -> None:
    """NaN and infinite states, and logits that an overflow made infinite: one number of one row is enough."""
    weight = torch.randn(3, 8)
    wrong_state = torch.ones(2, 3)
    wrong_state[1, 2] = value
    wrong_logit = torch.zeros(2, 8)
    wrong_logit[1] = torch.where(torch.arange(8) == 4, value, 0.0) if value != -torch.inf else value
    sampling = SamplingSettings(temperature=temperature)
    for hidden, head in ((wrong_state, lambda some: some @ weight), (wrong_logit, lambda some: some)):
        with pytest.raises(EdgespecError, match="NaN or infinite"):
            ask(TargetRows(hidden, head, sampling, vocab=8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_first_of_equal_logits_is_best(dtype: torch.dtype) -> None:
    """Rounding makes many of a large vocabulary's equal; float64's own digits count."""
    logits = torch.full((3, 5000), -2.0, dtype=dtype)
    logits[0, [7, 70, 4999]] = -1.0
    logits[1, [4000, 4998]] = torch.tensor([1.0, 1.0 + (1e-9 if dtype == torch.float64 else 0.0)], dtype=dtype)
    rows = TargetRows(logits, lambda some: some, SamplingSettings(temperature=0), vocab=5000)
    assert [rows.best(node) for node in range(3)] == [7, 4998 if dtype == torch.float64 else 4000, 0]


def test_tokens_that_the_head_rules_out_are_no_overflow() -> None:
    """Some families mask rows of padding with minus infinity."""
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    rows = TargetRows(logits, lambda some: some, SamplingSettings(temperature=1), vocab=3)
    assert rows.probs(0)[1] == 0
    assert rows.best(0) == 2
