"""Records of candidates: what the target takes of them, and what children of each draw would be worth."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from edgespec.grow.acceptance import COLUMNS, NUM_CANDIDATES
from edgespec.sampling.draws import SMALLEST_UNIFORM
from edgespec.train import candidates
from edgespec.train.candidates import NUM_NOISES, NUM_RANKS, CandidateRecords, candidate_records, path_records
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance

VOCAB = 50


def random_probs(seed: int, rows: int, vocab: int = VOCAB) -> Tensor:
    return (2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(
        -1
    )


def records_of(q: Tensor, p: Tensor, *, temperature: float = 0.8, seed: int = 0) -> CandidateRecords:
    return candidate_records(
        q, p, torch.ones(q.shape[0]), temperature=temperature, generator=torch.Generator().manual_seed(seed)
    )


def first_noise(q: Tensor, seed: int = 0) -> Tensor:
    """Gumbel noise [n, vocab] of the first records of q [n, vocab]."""
    uniform = torch.rand(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return -(-uniform.clamp(min=SMALLEST_UNIFORM).log()).log()


def test_the_label_is_the_rank_of_the_token_that_the_target_draws_with_the_drafts_noise() -> None:
    q, p = random_probs(1, 200), random_probs(2, 200)
    found, gumbel = records_of(q, p), first_noise(q)
    assert found["taken"].shape == (200 * NUM_NOISES,)
    for node in range(200):
        best = (q[node].log() + gumbel[node]).argsort(descending=True)[:NUM_CANDIDATES].tolist()
        token = int((p[node].log() + gumbel[node]).argmax())
        assert found["taken"][node] == (best.index(token) if token in best else NUM_CANDIDATES)
    assert 0 < int((found["taken"] == NUM_CANDIDATES).sum()) < 200


def test_columns_are_those_that_growth_knows() -> None:
    q, p = random_probs(1, 3), random_probs(2, 3)
    found, gumbel = records_of(q, p), first_noise(q)
    perturbed = (q.log() + gumbel).softmax(-1)
    order = perturbed.argsort(-1, descending=True)[:, :NUM_CANDIDATES]
    torch.testing.assert_close(found["perturbed"][:3], perturbed.gather(1, order))
    torch.testing.assert_close(found["q"][:3], q.gather(1, order))
    torch.testing.assert_close(found["gumbel"][:3], gumbel.gather(1, order))
    torch.testing.assert_close(found["top_q"][:3, 0], q.amax(-1))
    assert all(found[name].shape[0] == 3 * NUM_NOISES for name in found)
    assert found.keys() == {*COLUMNS, "taken", "sampled_rates", "chosen_rates"}


def test_a_greedy_target_takes_its_first_choice_and_is_looked_at_once() -> None:
    q, p = random_probs(1, 60), random_probs(2, 60)
    found = records_of(q, p, temperature=0.0)
    assert found["taken"].shape == (60,)
    assert found["gumbel"].count_nonzero() == 0
    assert torch.equal(found["q"], found["perturbed"])
    best = q.argsort(-1, descending=True)[:, :NUM_CANDIDATES]
    for node, taken in enumerate(found["taken"].tolist()):
        choice = int(p[node].argmax())
        assert (int(best[node, taken]) == choice) if taken < NUM_CANDIDATES else (choice not in best[node])


def test_a_draft_that_is_the_target_has_its_token_first() -> None:
    p = random_probs(1, 100)
    assert records_of(p, p)["taken"].count_nonzero() == 0


def test_what_the_draft_cannot_draw_is_none_of_its_candidates() -> None:
    q, p = random_probs(1, 20, 8), torch.zeros(20, 8, dtype=torch.float64)
    q[:, 3], p[:, 3] = 0, 1
    found = records_of(q, p)
    assert set(found["taken"].tolist()) == {NUM_CANDIDATES}
    assert found["perturbed"][:, 8:].count_nonzero() == 0, "a small vocabulary has fewer"


def test_the_first_candidate_is_taken_as_often_as_the_coupling_says() -> None:
    """Daliri et al. 2024: sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i); 16,000 noises, 4 deviations."""
    q, p = random_probs(1, 1, 6), random_probs(2, 1, 6)
    rows = 4000
    taken = records_of(q.expand(rows, -1), p.expand(rows, -1))["taken"]
    ratios = torch.maximum(p[0][None] / p[0][:, None], q[0][None] / q[0][:, None])  # [i, j]
    expected = float((1 / ratios.sum(1)).sum())
    deviation = (expected * (1 - expected) / taken.shape[0]) ** 0.5
    assert abs(float((taken == 0).double().mean()) - expected) < 4 * deviation


def sequential_orders(q: Tensor) -> dict[tuple[int, ...], Fraction]:
    """Every order of three tokens that draws without replacement can have, and its chance."""
    found = {}
    for order in itertools.permutations(range(q.shape[0]), 3):
        chance, left = Fraction(1), Fraction(1)
        for token in order:
            chance *= Fraction(float(q[token])) / left
            left -= Fraction(float(q[token]))
        found[order] = chance
    return found


def literal_rounds(p: Tensor, q: Tensor, order: tuple[int, ...]) -> list[float]:
    """DySpec's Algorithm 3: the chance that the child of each rank is the one accepted."""
    target, draft, none_before, found = p.clone(), q.clone(), 1.0, []
    for token in order:
        chance = min(1.0, float(target[token] / draft[token]))
        found.append(none_before * chance)
        none_before *= 1 - chance
        target = (target - draft).clamp(min=0)
        target = target / target.sum() if target.sum() > 0 else target
        draft[token] = 0
        draft = draft / draft.sum()
    return found


def test_rates_of_sampled_children_are_those_of_the_published_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumerated over every order of three of four tokens: on average, and for each of them."""
    q, p = random_probs(3, 1, 4)[0], random_probs(4, 1, 4)[0]
    orders = sequential_orders(q)
    tokens = torch.tensor(list(orders))
    monkeypatch.setattr(candidates, "draw_without_replacement", lambda *_: (tokens, q[tokens]))
    rows = len(orders)
    found = records_of(q.expand(rows, -1), p.expand(rows, -1), temperature=0.0)["sampled_rates"]
    assert found.shape == (rows, NUM_RANKS)
    assert found[:, 3:].count_nonzero() == 0
    for row, order in enumerate(orders):
        assert found[row, :3].tolist() == pytest.approx(literal_rounds(p, q, order))
    weights = torch.tensor([float(chance) for chance in orders.values()], dtype=torch.float64)
    first = float((weights * found[:, 0]).sum())
    assert first == pytest.approx(float(torch.minimum(p, q).sum())), "1 less the distance of p and q"


def test_where_a_draft_has_one_token_the_others_are_no_children() -> None:
    q = torch.nn.functional.one_hot(torch.tensor([2]), 6).double()
    found = records_of(q, random_probs(1, 1, 6))["sampled_rates"]
    assert found[:, 0].tolist() == pytest.approx([float(random_probs(1, 1, 6)[0, 2])] * NUM_NOISES)
    assert found[:, 1:].count_nonzero() == 0


def test_rates_of_chosen_children_are_ps_at_the_best_of_q() -> None:
    q, p = random_probs(1, 5), random_probs(2, 5)
    found = records_of(q, p, temperature=0.0)["chosen_rates"]
    torch.testing.assert_close(found, p.gather(1, q.argsort(-1, descending=True)[:, :NUM_RANKS]))


def test_records_of_a_tree_are_of_the_nodes_that_the_text_went_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of them, those that the draft expanded: it says nothing of the others."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    monkeypatch.setattr(
        candidates, "candidate_records", lambda q, p, depths, **_: seen.append((q, p, depths)) or {"taken": depths}
    )
    tree = TokenTree(
        tokens=torch.arange(6), parents=torch.tensor([-1, 0, 0, 2, 3, 3]), ranks=torch.tensor([0, 0, 1, 0, 0, 1]),
        draw="coupled", draft_rows=torch.tensor([0, 2, 1, 3, -1, 4]), draft_probs=random_probs(1, 5),
    )  # fmt: skip
    p = random_probs(2, 6)
    path_records(tree, p, Acceptance(path=(2, 3, 4), next_token=0), temperature=1.0, generator=torch.Generator())
    ((q, found_p, depths),) = seen
    assert torch.equal(q, tree.draft_probs[[0, 1, 3]])
    assert torch.equal(found_p, p[[0, 2, 3]])
    assert depths.tolist() == [1, 2, 3], "of what follows them"
