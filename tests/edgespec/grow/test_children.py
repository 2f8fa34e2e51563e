"""Children under the text's noise: the best of log q + g, valued by q'."""

import pytest
import torch
from torch import Tensor

from edgespec.grow import children
from edgespec.grow.batched import grown
from edgespec.grow.beam import Beam, BeamRule, by_path_probability
from edgespec.grow.children import best_children, under_noise
from edgespec.grow.growing import Layer
from edgespec.sampling.noise import TextNoise, exponential_noise
from tests.edgespec.grow.test_best_first import FunctionDrafter, random_q

CPU = torch.device("cpu")
VOCAB = 30


def some(seed: int) -> tuple[Tensor, Tensor]:
    """Q [4, vocab] with zeros, and e^g [vocab]."""
    logits = 2 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[1, 3:9] = -torch.inf
    return logits.softmax(-1), 1 / exponential_noise(seed, 0, 1, VOCAB)


@pytest.mark.parametrize("seed", range(10))
def test_the_best_under_noise_are_those_of_the_largest_q_times_noise(seed: int) -> None:
    q, noise = some(seed)
    tokens, _ = best_children(q, 8, noise)
    assert torch.equal(tokens, (q * noise).argsort(-1, descending=True)[:, :8])
    assert not torch.equal(tokens, best_children(q, 8, None)[0])


@pytest.mark.parametrize("seed", range(10))
def test_they_are_valued_by_the_softmax_of_log_q_and_the_noise(seed: int) -> None:
    q, noise = some(seed)
    perturbed = under_noise(q, noise)
    torch.testing.assert_close(perturbed, (q.log() + noise.log()).softmax(-1))
    torch.testing.assert_close(perturbed.sum(-1), torch.ones(4, dtype=torch.float64))
    tokens, values = best_children(q, 8, noise)
    assert torch.equal(values, perturbed.gather(1, tokens))
    assert perturbed[1, 3:9].count_nonzero() == 0, "a token of no probability stays one"


def test_without_noise_they_are_the_most_probable() -> None:
    q, _ = some(0)
    tokens, values = best_children(q, 3, None)
    assert torch.equal(values, q.sort(-1, descending=True).values[:, :3])
    assert torch.equal(values, q.gather(1, tokens))


def test_a_small_vocabulary_has_fewer() -> None:
    q, noise = some(0)
    assert best_children(q, 100, noise)[0].shape == (4, VOCAB)


def test_rows_with_noise_of_their_own_are_looked_at_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As records of a large vocabulary are made."""
    q, noise = torch.rand(5, 40), torch.rand(5, 40)
    whole = best_children(q, 4, noise)
    monkeypatch.setattr(children, "CHUNK_ELEMENTS", 2 * 40)
    for some, all_at_once in zip(best_children(q, 4, noise), whole, strict=True):
        assert torch.equal(some, all_at_once)


def test_q_of_a_layer_is_what_its_children_are_the_best_of() -> None:
    q, noise = some(2)
    drawn, values = best_children(q, 5, noise)
    ones = torch.ones(4)
    layer = Layer(
        depth=1, draft_q=q, noise=noise, drawn=drawn, q_drawn=values, values=ones, path_probability=ones,
        rows=torch.arange(4),
    )  # fmt: skip
    assert torch.equal(layer.q.gather(1, drawn), values)


def test_every_layer_of_a_tree_has_the_noise_of_its_own_position() -> None:
    """One vector a layer: cousins share it, and a child has another than its parent."""
    q_of, noise = random_q(VOCAB, 1.0, 3), TextNoise(seed=1, key=2, vocab=VOCAB, device=CPU)
    noise.start(40)
    beam = Beam(
        root=0, rule=BeamRule(score=by_path_probability), draw="coupled", size=40, depth=4,
        max_children=VOCAB, device=CPU, noise=noise,
    )  # fmt: skip
    tree = grown(beam, FunctionDrafter(q_of))
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        above = paths[int(tree.parents[node])]
        order = (q_of(above).log() - exponential_noise(1, 2, 41 + len(above), VOCAB).log()).argsort(descending=True)
        assert int(tree.tokens[node]) == int(order[int(tree.ranks[node])])
        paths.append((*above, int(tree.tokens[node])))
    assert max(map(len, paths)) > 1
    assert (tree.draw, tree.draft_probs) == ("coupled", None)
