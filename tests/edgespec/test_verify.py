"""Verification rules against their literal statement."""

import dataclasses

import pytest
import torch
from torch import Tensor

from edgespec.tree import TokenTree
from edgespec.verify.greedy import verify_greedy
from edgespec.verify.rejection import verify_rejection


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
        draw="without_replacement",
        draft_rows=torch.arange(nodes),
        draft_probs=q,
    )


def literal_greedy(tree: TokenTree, p: Tensor) -> tuple[list[int], int]:
    node, path = 0, []
    while True:
        best = int(p[node].argmax())
        follow = [
            child for child in range(1, tree.num_nodes) if tree.parents[child] == node and tree.tokens[child] == best
        ]
        if not follow:
            return path, best
        node = follow[0]
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
    acceptance = verify_greedy(tree, p, generator)
    path, bonus = literal_greedy(tree, p)
    assert list(acceptance.path) == path
    assert acceptance.next_token == bonus


@pytest.mark.parametrize("seed", range(60))
def test_rejection_takes_the_literal_algorithms_path(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, nodes=50, vocab=6)
    p = (torch.randn(50, 6, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)
    residuals: list[Tensor] = []

    def remember(probs: Tensor, _generator: torch.Generator) -> int:
        residuals.append(probs)
        return 0

    monkeypatch.setattr("edgespec.verify.rejection.draw_one", remember)
    acceptance = verify_rejection(tree, p, torch.Generator().manual_seed(seed))
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
            draw="without_replacement",
            draft_rows=torch.tensor([0, -1]),
            draft_probs=q,
        )
        nearly = q * (1 + 1e-7 * (torch.rand(1, 9, generator=generator) - 0.5))
        acceptance = verify_rejection(tree, torch.cat([nearly, nearly]), generator)
        assert acceptance.path == (1,)


def test_rejection_refuses_chosen_children_and_names_the_sound_pairs() -> None:
    tree = dataclasses.replace(random_tree(torch.Generator().manual_seed(0), nodes=4, vocab=5), draw="top_k")
    with pytest.raises(ValueError, match=r"membership.*top_k"):
        verify_rejection(tree, torch.rand(4, 5), torch.Generator())
