"""Multi-round rejection, enumerated: every order in which children can be drawn, with its exact chance.

What comes out of a node is then a sum, no sample: it must be the target's p to the last digits, for drafts and
targets that are flat, sharp, one-hot, with exact zeros, equal, nearly equal and disjoint, in the formats that run.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from edgespec.grow.growing import mass_left
from edgespec.sampling.draws import draw_without_replacement
from edgespec.train import records
from edgespec.verify import rejection
from edgespec.verify.rejection import acceptance_of, reject
from tests.support.lossless import law_p_value

VOCAB = 6
FLOATS = [torch.float32, torch.float64]
GAPS = [8, 14, 17, 20, 40]


def probabilities(seed: int, *, gap: float = 0.0, at: int = 2) -> Tensor:
    """Random ones in float64, one token so many nats above its own logit."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[at] += gap
    return logits.softmax(-1)


def one_hot(at: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(at), VOCAB).double()


def with_zeros(probs: Tensor, *at: int) -> Tensor:
    left = probs.clone()
    left[list(at)] = 0
    return left / left.sum()


P, Q = probabilities(1), probabilities(2)
PAIRS = {
    "flat": (P, Q),
    **{f"draft gap {gap}": (P, probabilities(2, gap=gap)) for gap in GAPS},
    **{f"target gap {gap}": (probabilities(1, gap=gap), Q) for gap in (8, 17, 40)},
    "both gap 17": (probabilities(1, gap=17), probabilities(2, gap=17)),
    "both gap 17, apart": (probabilities(1, gap=17), probabilities(2, gap=17, at=4)),
    "q one-hot": (P, one_hot(3)),
    "p one-hot": (one_hot(3), Q),
    "both one-hot": (one_hot(3), one_hot(3)),
    "q with zeros": (P, with_zeros(Q, 0, 4)),
    "p with zeros": (with_zeros(P, 1, 5), Q),
    "p with zeros, draft gap 20": (with_zeros(P, 1, 5), probabilities(2, gap=20)),
    "equal": (Q, Q),
    "nearly equal": ((Q * (1 + 1e-7 * P)) / (Q * (1 + 1e-7 * P)).sum(), Q),
    "disjoint": (with_zeros(P, 0, 1, 2), with_zeros(Q, 3, 4, 5)),
}


def orders(q: Tensor, count: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every order of at most `count` tokens that draws without replacement can have, and its chance: exact."""
    weights = [Fraction(float(value)) for value in q]
    possible = [token for token in range(VOCAB) if weights[token] > 0]
    for order in itertools.permutations(possible, min(count, len(possible))):
        chance, left = Fraction(1), sum(weights)
        for token in order:
            chance *= weights[token] / left
            left -= weights[token]
        yield order, chance


def output(p: Tensor, q: Tensor, count: int) -> Tensor:
    """The distribution of a node's token over all that can be drawn: [vocab]."""
    weights = {token: Fraction(float(value)) for token, value in enumerate(q) if value > 0}
    most = min(count, len(weights))
    found = torch.zeros(VOCAB, dtype=torch.float64)

    def go_on(order: tuple[int, ...], chance: Fraction, reached: float, residual: Tensor, remaining: Tensor) -> None:
        """Add what a node yields whose first children are these, and all rejected: with these two chances."""
        if len(order) == most:
            found.add_(float(chance) * reached * residual[0] / residual.sum())
            return
        left = sum(weight for token, weight in weights.items() if token not in order)
        for token, weight in weights.items():
            if token not in order:
                drawn, own = torch.tensor([token]), chance * weight / left
                accepted = float(acceptance_of(residual, remaining, drawn))
                found[token] += float(own) * reached * accepted
                go_on((*order, token), own, reached * (1 - accepted), *reject(residual, remaining, drawn))

    go_on((), Fraction(1), 1.0, p.double()[None], q.double()[None])
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_node_yields_exactly_the_targets_distribution(name: str, dtype: torch.dtype) -> None:
    p, q = (probs.to(dtype) for probs in PAIRS[name])
    for count in (1, 4):
        expected = p.double() / p.double().sum()
        found = output(p, q, count)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        assert not found[expected == 0].any(), "a token of no probability"


@pytest.mark.parametrize("name", PAIRS)
def test_records_hold_the_acceptance_of_verifications_own_rounds(name: str) -> None:
    p, q = (probs.float() for probs in PAIRS[name])
    for order, _ in itertools.islice(orders(q, 3), 20):
        tokens = torch.tensor([order])
        found = records.acceptance_by_round(p[None], q[None], tokens, torch.ones_like(tokens, dtype=torch.bool))
        residual, remaining = p.double()[None], q.double()[None]
        for rank, token in enumerate(order):
            assert found[0, rank] == acceptance_of(residual, remaining, torch.tensor([token]))
            residual, remaining = reject(residual, remaining, torch.tensor([token]))


@pytest.mark.parametrize("name", PAIRS)
def test_children_are_tried_with_these_chances(name: str) -> None:
    """A uniform number just below a child's acceptance takes it, one just above does not."""
    p, q = (probs.float() for probs in PAIRS[name])
    for order, _ in itertools.islice(orders(q, 3), 20):
        chances = records.acceptance_by_round(
            p[None], q[None], torch.tensor([order]), torch.ones(1, len(order), dtype=torch.bool)
        )[0].tolist()
        for rank, chance in enumerate(chances):
            before = [1.0] * rank  # a uniform number is below 1: none of those before is accepted
            after = [1.0] * (len(order) - rank - 1)
            if chance > 0:
                assert rejection._try_children(p, q, list(order), [*before, chance * (1 - 1e-12), *after])[0] == rank
            if chance < 1:
                assert rejection._try_children(p, q, list(order), [*before, chance, *after])[0] != rank


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gap", [0, *GAPS])
def test_sharp_drafts_are_drawn_in_the_order_of_sequential_draws(gap: int, dtype: torch.dtype) -> None:
    """60,000 ordered triples: behind the sure token the others come by what they have among themselves."""
    q = probabilities(2, gap=gap).to(dtype)
    tokens, q_drawn = draw_without_replacement(q.expand(60_000, VOCAB), 3, torch.Generator().manual_seed(gap))
    assert torch.equal(q_drawn, q[tokens])
    law = {order: float(chance) for order, chance in orders(q, 3)}
    codes, seen = tokens.unique(dim=0, return_counts=True)
    counts = dict.fromkeys(law, 0) | {
        tuple(order): count for order, count in zip(codes.tolist(), seen.tolist(), strict=True)
    }
    assert law_p_value(counts, law) > 1e-4


@pytest.mark.parametrize("name", PAIRS)
def test_the_mass_before_each_draw_is_a_sum_of_what_is_left(name: str) -> None:
    q = PAIRS[name][1].float()
    for order, _ in itertools.islice(orders(q, 4), 30):
        drawn = torch.tensor([order])
        weights = [Fraction(float(value)) for value in q]
        expected = [float(sum(weights) - sum(weights[token] for token in order[:rank])) for rank in range(len(order))]
        torch.testing.assert_close(mass_left(q[None], drawn, q[drawn]), torch.tensor([expected]), rtol=1e-6, atol=0)


def test_a_row_that_has_run_out_of_tokens_keeps_what_it_had() -> None:
    """What stands behind its last draw is no draw, and may name any token."""
    q = torch.tensor([[0.0, 0.75, 0.25]])
    drawn, q_drawn = torch.tensor([[1, 2, 0, 0]]), torch.tensor([[0.75, 0.25, 0.0, 0.0]])
    found = mass_left(q, drawn, q_drawn)
    assert found[0, :2].tolist() == [1.0, 0.25]
    assert 0 < float(found[0, 2:].max()) < 1e-30
