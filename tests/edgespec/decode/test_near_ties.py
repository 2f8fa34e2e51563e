"""Texts whose near ties are decided by rows as in plain decoding are plain decoding's, however products round."""

from typing import Any

import pytest
import torch

from edgespec import Engine, TreeSettings
from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.model.target import Target
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.tree.token_tree import chain_of
from edgespec.verify.near_ties import LEAST_MEASURED, SAFETY, NearTies
from tests.support.rounding_by_rows import rounding_by_rows

PLAIN, TREE = TreeSettings(policy="none"), TreeSettings(size=9, lookup=False)
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.9, "top_k": 20},
]  # fmt: skip
PROMPTS = [
    "def main(",
    "import os\nclass",
    "for name in list",
    "return self.value if",
    "while True:\n",
    "if not x else",
]
NUM_TEXTS, NEW = 8, 12


def opened(tree: TreeSettings, *, exact: bool, parallel: int = 1) -> Engine:
    small = DEMO_FOLDER / "draft"
    return Engine.from_pretrained(
        small, draft=small, tree=tree, exact=exact, parallel=parallel, dtype="float32", device="cpu",
        context_tokens=128, threads=1,
    )  # fmt: skip


def texts(tree: TreeSettings, *, exact: bool, parallel: int = 1) -> tuple[list[tuple[int, ...]], int, int]:
    """The tokens of all texts, how many near ties were decided, and how many of these turned."""
    with rounding_by_rows(lambda: opened(tree, exact=exact, parallel=parallel)) as engine:
        requests = [
            engine.request(
                PROMPTS[seed % len(PROMPTS)], max_new_tokens=NEW, seed=seed, ignore_eos=True, **WAYS[seed % len(WAYS)]
            )
            for seed in range(NUM_TEXTS)
        ]
        results = dict(engine.generate_many(requests))
    steps, tokens = [], []
    for _, result in sorted(results.items()):
        assert not isinstance(result, Exception)
        steps += result.passes
        tokens.append(result.token_ids)
    return tokens, sum(step.num_read_again > 0 for step in steps), sum(step.turned for step in steps)


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return texts(PLAIN, exact=False)[0]


def test_trees_alone_turn_some_texts(plain: list[tuple[int, ...]]) -> None:
    assert texts(TREE, exact=False)[0] != plain


@pytest.mark.parametrize("parallel", [1, 5])
def test_exact_texts_are_plain_decodings_alone_and_in_company(plain: list[tuple[int, ...]], parallel: int) -> None:
    found, num_decided, num_turned = texts(TREE, exact=True, parallel=parallel)
    assert found == plain
    assert 0 < num_turned < num_decided < 0.7 * NUM_TEXTS * NEW


def test_exact_plain_texts_in_company_read_nothing_again(plain: list[tuple[int, ...]]) -> None:
    assert texts(PLAIN, exact=True, parallel=5) == (plain, 0, 0)


def test_a_text_that_goes_on_behind_kept_rows_is_that_of_a_new_engine() -> None:
    one: dict[str, Any] = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    with rounding_by_rows(lambda: opened(TREE, exact=True)) as engine:
        engine.generate("def main(self, name", max_new_tokens=NEW, **one)
        again = [engine.generate("def main(self, other", max_new_tokens=NEW, reuse=True, **one) for _ in range(2)]
    with rounding_by_rows(lambda: opened(PLAIN, exact=True)) as engine:
        expected = engine.generate("def main(self, other", max_new_tokens=NEW, **one)
    assert {one.token_ids for one in again} == {expected.token_ids}
    assert [one.cached_tokens for one in again] == [0, expected.prompt_tokens]


def measured(change: float) -> NearTies:
    """Near ties that have seen the difference of two logits change so far."""
    ties = NearTies()
    alone = torch.tensor([[0.0, 1.0, 2.0]]).expand(LEAST_MEASURED, -1)
    ties.learn(alone + torch.tensor([0.0, 0.0, change]), alone, num_rows=9)
    return ties


def test_a_choice_is_near_within_the_measured_change_and_before_any_was_measured() -> None:
    ties, greedy = measured(0.1), SamplingSettings(temperature=0.0)
    assert ties.margin == pytest.approx(SAFETY * 0.1)
    logits = torch.tensor([[5.0, 4.81, 4.0]])
    assert ties.is_near(logits, 0, greedy, None, num_rows=9)
    assert not ties.is_near(logits - torch.tensor([[0.0, 0.02, 0.0]]), 0, greedy, None, num_rows=9)
    assert ties.is_near(logits - torch.tensor([[0.0, 0.02, 0.0]]), 0, greedy, None, num_rows=99)
    assert ties.is_near(
        logits - torch.tensor([[0.0, 0.02, 0.0]]), 0, SamplingSettings(temperature=0.0, repetition_penalty=1.2), None,
        num_rows=9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "logits", "e_to_g", "is_near"),
    [
        # The noise makes the third token's score 3 + 0.5 log 60: 5.05 beside 5.
        (SamplingSettings(temperature=0.5), [5.0, 2.0, 3.0], [1.0, 1.0, 60.0], True),
        (SamplingSettings(temperature=0.5), [5.0, 2.0, 3.0], [1.0, 1.0, 20.0], False),
        # The chosen one is the last that is kept, by 0.1; or it is the first alone, and the next one is cut by 0.1.
        (SamplingSettings(temperature=0.5, top_k=2), [5.0, 3.1, 3.0], [1.0, 900.0, 1.0], True),
        (SamplingSettings(temperature=0.5, top_k=1), [5.0, 4.9, 3.0], [1.0, 900.0, 1.0], True),
        (SamplingSettings(temperature=0.5, top_k=1), [5.0, 4.7, 3.0], [1.0, 900.0, 1.0], False),
        # The mass before the third ends at the edge; then equal ones change places there.
        (SamplingSettings(temperature=1.0, top_p=0.95), [0.6, 0.35, 0.05], [1.0, 1.0, 900.0], True),
        (SamplingSettings(temperature=1.0, top_p=0.5), [0.6, 0.39, 0.01], [1.0, 1.0, 9000.0], False),
        (SamplingSettings(temperature=1.0, top_p=0.8), [0.6, 0.21, 0.19], [1.0, 1.0, 900.0], True),
        (SamplingSettings(temperature=1.0, min_p=0.5), [0.6, 0.29, 0.11], [1.0, 900.0, 1.0], True),
    ],
)
def test_noise_and_edges_count(
    sampling: SamplingSettings, logits: list[float], e_to_g: list[float], is_near: bool
) -> None:
    row = torch.tensor([logits], dtype=torch.float64)
    row = row.log() if sampling.temperature == 1 else row
    noise = torch.tensor(e_to_g, dtype=torch.float64)
    chosen = int(sampling.top_k == 2)
    assert measured(0.1).is_near(row, chosen, sampling, noise, num_rows=9) == is_near


def test_a_long_stretch_is_read_again_whatever_its_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.decode.accept.MOST_UNREAD", 4)
    monkeypatch.setattr(NearTies, "is_near", lambda *_, **__: False)
    with rounding_by_rows(lambda: opened(TREE, exact=True)) as engine:
        result = engine.generate("def main(", max_new_tokens=20, temperature=0.0, ignore_eos=True)
    assert sum(step.num_read_again > 0 for step in result.passes) >= 3
    assert max(step.num_read_again for step in result.passes) <= 4


def test_texts_that_depend_on_their_trees_are_refused() -> None:
    with pytest.raises(EdgespecError, match="draw=sampled"):
        opened(TreeSettings(policy="dyspec"), exact=True)


def test_rows_that_are_read_again_have_plain_decodings_bits() -> None:
    """Those of the step before as well, which its tree had left to the text."""
    prompt, new = list(range(20, 60)), [7, 9, 11, 13, 15, 17]
    with rounding_by_rows(lambda: opened(TREE, exact=True)) as engine:
        again, plain = (Target(engine.target_model) for _ in range(2))
        for target in (again, plain):
            target.prefill(torch.tensor(prompt))
        again.look(chain_of(torch.tensor(new[:3])))
        again.commit((1, 2))
        again.look(chain_of(torch.tensor(new[3:])))
        for token in new:
            plain.look(chain_of(torch.tensor([token])))
            plain.commit(())
        expected = plain.cache.tensors()
        assert not torch.equal(again.cache.copy(43).tensors()["keys.1"], expected["keys.1"][:43])
        again.begin_exactly((1, 2))
        again.read([again.exact_rows()])
        again.took_in(again.num_unread)
        found = again.cache.tensors()
    assert (again.cache.num_exact, plain.cache.num_exact) == (46, 46)
    assert list(again.cache.ids) == [*prompt, *new]
    assert all(torch.equal(found[name], rows) for name, rows in expected.items())
