"""Verification by the text's noise, which goes with coupled children alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from scipy import stats
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.grow.children import best_children
from edgespec.sampling.noise import TextNoise, exponential_noise
from edgespec.tree.policies import DRAWS, Draw
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import accept_alone, rejection
from edgespec.verify.rejection import verify_rejection
from edgespec.verify.rules import verifier
from edgespec.verify.walk import verify_coupled, verify_membership
from tests.edgespec.verify.test_walks import DenseRows, literal_walk, random_tree

CPU = torch.device("cpu")
WARM = SamplingSettings(temperature=0.8)
VOCAB = 4


def text_noise(seed: int, *, at: int = 9) -> TextNoise:
    found = TextNoise(seed=seed, key=0, vocab=VOCAB, device=CPU)
    found.start(at)
    return found


def tree_of(seed: int, draw: Draw = "coupled", *, nodes: int = 40) -> TokenTree:
    tree = random_tree(torch.Generator().manual_seed(seed), nodes=nodes, vocab=VOCAB)
    return dataclasses.replace(tree, draw=draw)


def random_p(seed: int, nodes: int = 40) -> Tensor:
    logits = 2 * torch.randn(nodes, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = logits.softmax(-1)
    p[:, seed % VOCAB] = 0  # as truncation leaves it
    return p


def drawn(p: Tensor, seed: int, at: int) -> Callable[[int, int], int]:
    """At each position the argmax of log p and its Gumbel noise."""
    noise = functools.partial(exponential_noise, seed, 0)
    return lambda node, depth: int((p[node].log() - noise(at + depth + 1, VOCAB).log()).argmax())


@pytest.mark.parametrize("seed", range(40))
def test_the_walk_goes_where_the_target_draws_with_the_noise_of_each_position(seed: int) -> None:
    tree, p = tree_of(seed), random_p(seed)
    found = accept_alone(verify_coupled(tree, DenseRows(p), text_noise(seed)))
    assert (list(found.path), found.next_token) == literal_walk(tree, drawn(p, seed, at=9))


def test_it_takes_the_same_token_from_a_smaller_tree() -> None:
    """A tree decides how far a step comes, never where to."""
    for seed in range(40):
        tree, p = tree_of(seed), random_p(seed)
        whole = accept_alone(verify_coupled(tree, DenseRows(p), text_noise(seed)))
        tokens = [*tree.tokens[list(whole.path)].tolist(), whole.next_token]
        few = dataclasses.replace(
            tree, tokens=tree.tokens[:5], parents=tree.parents[:5], ranks=tree.ranks[:5], draft_rows=tree.draft_rows[:5]
        )
        part = accept_alone(verify_coupled(few, DenseRows(p), text_noise(seed)))
        assert [*few.tokens[list(part.path)].tolist(), part.next_token] == tokens[: len(part.path) + 1]


@pytest.mark.parametrize("draw", ["sampled", "chosen"])
def test_the_texts_noise_refuses_children_that_came_about_otherwise(draw: Draw) -> None:
    with pytest.raises(ValueError, match=f"draw '{draw}'"):
        accept_alone(verify_coupled(tree_of(0, draw), DenseRows(random_p(0)), text_noise(0)))


def test_the_other_rules_refuse_coupled_children_and_name_the_sound_pairs() -> None:
    rows, generator = DenseRows(random_p(0)), torch.Generator()
    with pytest.raises(ValueError, match=r"rejection is not lossless for draw 'coupled'.*'sampled'.*'chosen'"):
        accept_alone(verify_rejection(tree_of(0), rows, generator))
    with pytest.raises(ValueError, match=r"membership does not go with draw 'coupled'.*'chosen'.*'sampled'"):
        accept_alone(verify_membership(tree_of(0), rows, generator))


@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_has_the_rule_that_takes_its_trees(draw: Draw) -> None:
    assert get_args(Draw) == DRAWS
    verify = verifier(WARM, draw, text_noise(0))
    accept_alone(verify(tree_of(0, draw), DenseRows(random_p(0)), torch.Generator().manual_seed(0)))
    for other in DRAWS:
        if other != draw:
            with pytest.raises(ValueError, match=f"draw '{other}'"):
                accept_alone(verify(tree_of(0, other), DenseRows(random_p(0)), torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("draw", DRAWS)
def test_a_greedy_target_takes_its_first_choice_whatever_the_noise(draw: Draw) -> None:
    tree, p = tree_of(1, draw), random_p(1)
    found = {
        accept_alone(verifier(SamplingSettings(), draw, text_noise(seed))(tree, DenseRows(p), torch.Generator()))
        for seed in range(9)
    }
    (acceptance,) = found
    assert acceptance.next_token == int(p[(0, *acceptance.path)[-1]].argmax())


@pytest.mark.parametrize("draw", ["sampled", "chosen"])
def test_rules_with_luck_of_their_own_do_not_look_at_the_texts_noise(draw: Draw) -> None:
    for seed in range(20):
        tree, p = tree_of(seed, draw), random_p(seed)
        first, other = (
            accept_alone(
                verifier(WARM, draw, text_noise(noise))(tree, DenseRows(p), torch.Generator().manual_seed(seed))
            )
            for noise in (1, 2)
        )
        assert first == other


def rejection_p_value(p: Tensor, q: Tensor, *, shares_noise: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """The chi-square p-value of the first token of 3000 steps of rejection, whose child is the best of q under noise.

    That is a draw from q. `shares_noise` draws the residual's token with the same noise.
    """
    counts = torch.zeros(VOCAB)
    for seed in range(3000):
        noise = text_noise(seed)
        tokens, _ = best_children(q[None], 1, noise.below(1))
        tree = TokenTree(
            tokens=torch.cat([torch.tensor([0]), tokens[0]]), parents=torch.tensor([-1, 0]),
            ranks=torch.tensor([0, 0]), draw="sampled", draft_rows=torch.tensor([0, -1]), draft_probs=q[None],
        )  # fmt: skip
        if shares_noise:
            monkeypatch.setattr(rejection, "draw_one", lambda left, _, noise=noise: noise.draw(left, 1))
        found = accept_alone(verify_rejection(tree, DenseRows(p.expand(2, -1)), torch.Generator().manual_seed(seed)))
        counts[int(tree.tokens[found.path[0]]) if found.path else found.next_token] += 1
    return float(stats.chisquare(counts.double(), 3000 * p, sum_check=False).pvalue)


def test_rejection_that_shares_the_drafts_noise_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why the rule has none: what is left to draw then tells what was drawn before."""
    p = torch.tensor([0.05, 0.3, 0.6, 0.05], dtype=torch.float64)
    q = torch.tensor([0.5, 0.05, 0.4, 0.05], dtype=torch.float64)
    assert rejection_p_value(p, q, shares_noise=False, monkeypatch=monkeypatch) > 1e-3
    assert rejection_p_value(p, q, shares_noise=True, monkeypatch=monkeypatch) < 1e-6
