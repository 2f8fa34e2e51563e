"""Texts with penalties, bias and a grammar: what the definition says, whatever trees grow and who shares the passes.

The reference goes token by token, with transformers' processors and OpenAI's formula on the text so far.
"""

from collections import abc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode import accept
from edgespec.decode.batch import Batch
from edgespec.decode.loop import decode
from edgespec.decode.sequence import Sequence
from edgespec.decode.target_initialized import batch_of
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import exponential_noise
from edgespec.tree.settings import TreeSettings
from tests.edgespec.grow.tables import VOCAB, draft_logits, session_of, table_logits, target_logits
from tests.edgespec.grow.test_coupled_texts import COUPLED, settings_of, tree_file
from tests.edgespec.sampling.test_processors import by_definition

__all__ = ["tree_file"]  # a fixture
NUM_TOKENS = 16
STOP = VOCAB - 1
HEAVY = {"repetition_penalty": 1.8, "presence_penalty": 0.9, "frequency_penalty": 0.7, "logit_bias": {2: 3.0}}


def fits(new: abc.Sequence[int]) -> Tensor:
    """Which tokens may follow new ones, [vocab] bool: a grammar that depends on all of them."""
    return torch.tensor([(token + sum(new)) % 3 != len(new) % 3 for token in range(VOCAB)])


class ToyMatcher:
    def __init__(self) -> None:
        self.new: list[int] = []

    def add(self, tokens: abc.Sequence[int]) -> None:
        self.new += tokens

    def allowed(self, path: abc.Sequence[int]) -> Tensor | None:
        return fits([*self.new, *path])


class ToyGrammar:
    def matcher(self) -> ToyMatcher:
        return ToyMatcher()


def p_of(table: int, sampling: SamplingSettings, prompt: list[int], new: list[int], *, has_grammar: bool) -> Tensor:
    """The p [vocab] behind a prompt and new tokens: logits, bias and penalties, grammar, temperature, truncation."""
    ruled_out = [STOP] if sampling.ignore_eos else []
    logits = by_definition(table_logits(table, (*prompt, *new))[None], sampling, prompt, new, ruled_out)
    if has_grammar:
        logits = logits.masked_fill(~fits(new), -torch.inf)
    return to_probs(logits, sampling)[0]


def reference(
    table: int, sampling: SamplingSettings, prompt: list[int], *, seed: int, has_grammar: bool, num_tokens: int
) -> list[int]:
    """The text by the definition; it ends with the stop token."""
    new: list[int] = []
    while len(new) < num_tokens and STOP not in new:
        log_p = p_of(table, sampling, prompt, new, has_grammar=has_grammar).log()
        gumbel = -exponential_noise(seed, 0, len(prompt) + len(new), VOCAB).log()
        new.append(int((log_p + (gumbel if sampling.temperature > 0 else 0)).argmax()))
    return new


def processed_session(
    tree: TreeSettings, sampling: SamplingSettings, *, seed: int, has_grammar: bool, num_tokens: int = NUM_TOKENS,
    **text: Any,
) -> Sequence:  # fmt: skip
    text |= {"stop_tokens": frozenset({STOP}), "grammar": ToyGrammar() if has_grammar else None}
    return session_of(
        tree, sampling, target=target_logits(seed % 1000), draft=draft_logits(seed % 1000), max_new_tokens=num_tokens,
        seed=seed, text=text,
    )  # fmt: skip


def text_of(sequence: Sequence, prompt: list[int]) -> list[int]:
    return [token for step in decode(sequence, prompt) for token in step.tokens]


processed_sampling = st.builds(
    SamplingSettings,
    temperature=st.just(0.0) | st.floats(0.3, 1.5),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.8, 0.6]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.8]),
    logit_bias=st.sampled_from([{}, {2: 3.0, 5: -100.0}]),
    ignore_eos=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(COUPLED), size=st.integers(1, 48), depth=st.integers(1, 8), sampling=processed_sampling,
    has_grammar=st.booleans(), seed=st.integers(0, 2**63 - 1),
    prompt=st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=5),
)  # fmt: skip
def test_a_text_is_what_the_definition_says_whatever_the_policy(
    tree_file: Path, name: str, size: int, depth: int, sampling: SamplingSettings, has_grammar: bool, seed: int,
    prompt: list[int],
) -> None:  # fmt: skip
    tree = settings_of(name, size, depth, tree_file)
    sequence = processed_session(tree, sampling, seed=seed, has_grammar=has_grammar)
    expected = reference(
        seed % 1000, sampling, prompt, seed=seed, has_grammar=has_grammar, num_tokens=NUM_TOKENS
    )  # fmt: skip
    assert text_of(sequence, prompt) == expected


TREES = [TreeSettings(policy="none"), TreeSettings(size=9, depth=5), TreeSettings(policy="opt-tree", size=12, depth=5)]


def draw_of(number: int) -> tuple[TreeSettings, SamplingSettings, bool]:
    """Trees, sampling and grammar of a text, no two of which are alike next to each other."""
    warm = {"temperature": [0.0, 0.9][number % 2], "top_k": [0, 5][number // 2 % 2]}
    penalties: dict[str, Any] = [HEAVY, {}, {"presence_penalty": 1.5}, {"repetition_penalty": 0.6}][number % 4]
    return TREES[number % 3], SamplingSettings(**warm, **penalties), number % 5 < 2


def texts_together(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Texts that share passes, of different settings each, and what the definition says of each."""
    batch, found = Batch(), {}
    expected = []
    for number in range(count):
        tree, sampling, has_grammar = draw_of(number)
        sequence = processed_session(tree, sampling, seed=number, has_grammar=has_grammar)
        prompt = [number % VOCAB, 3]
        batch.enter(sequence, prompt)
        found[sequence] = list[int]()
        expected.append(
            reference(number, sampling, prompt, seed=number, has_grammar=has_grammar, num_tokens=NUM_TOKENS)
        )
    while batch.sequences:
        for outcome in batch.step():
            assert outcome.step is not None, outcome.error
            found[outcome.sequence] += outcome.step.tokens
    return list(found.values()), expected


def test_texts_that_share_passes_each_have_their_own() -> None:
    found, expected = texts_together(24)
    assert found == expected


@pytest.mark.parametrize("num_written", range(1, NUM_TOKENS, 3))
def test_a_text_that_goes_on_counts_what_is_written_as_its_own(num_written: int) -> None:
    """As when memory ran out and caches were made anew: the prompt that is read then holds new tokens too."""
    for number in range(12):
        tree, sampling, has_grammar = draw_of(number)
        prompt = [number % VOCAB, 3]
        whole = reference(number, sampling, prompt, seed=number, has_grammar=has_grammar, num_tokens=NUM_TOKENS)
        before, behind = whole[:num_written], whole[num_written:]
        if behind:
            sequence = processed_session(
                tree, sampling, seed=number, has_grammar=has_grammar, num_tokens=NUM_TOKENS - num_written,
                num_written=num_written,
            )  # fmt: skip
            assert text_of(sequence, prompt + before) == behind


SAMPLED = [
    TreeSettings(policy="dyspec", size=6),
    TreeSettings(policy="sequoia", draw="sampled", size=6),
    TreeSettings(policy="mcsd", draw="sampled", fork=(2, 3)),
    TreeSettings(policy="opt-tree", draw="chosen", size=6),
    TreeSettings(policy="eagle2", draw="chosen", size=6, depth=3),
]


LAWS = SamplingSettings(temperature=1.2, top_k=3, repetition_penalty=1.7, frequency_penalty=1.2)
LAWS_PROMPT, TABLE = [4, 7], 8


@pytest.fixture(scope="module")
def law() -> dict[tuple[int, ...], float]:
    """The chance of every text of 3 tokens that has one."""
    found = {(): 1.0}
    for _ in range(3):
        found = {
            (*text, token): chance * p
            for text, chance in found.items()
            for token, p in enumerate(p_of(TABLE, LAWS, LAWS_PROMPT, list(text), has_grammar=True).tolist())
            if p
        }
    return found


@pytest.mark.parametrize("tree", SAMPLED, ids=lambda tree: f"{tree.policy}-{tree.draw}")
def test_sampled_and_chosen_trees_give_the_processed_distribution(
    tree: TreeSettings, law: dict[tuple[int, ...], float]
) -> None:
    """Texts of 3 tokens beside their law; a false alarm has a chance of 1e-4, at one seed.

    400 of sampled trees, whose rule reads q; of chosen ones 200, which are far off where they are wrong.
    """
    count = 200 if tree.draw == "chosen" else 400
    seen = dict.fromkeys(law, 0)
    for seed in range(count):
        sequence = session_of(
            tree, LAWS, target=target_logits(TABLE), draft=draft_logits(TABLE), max_new_tokens=3, seed=seed,
            text={"grammar": ToyGrammar()},
        )  # fmt: skip
        seen[tuple(text_of(sequence, LAWS_PROMPT))] += 1
    kept = [text for text, chance in law.items() if chance * count >= 5]
    observed = [*(seen[text] for text in kept), sum(seen[text] for text in law if text not in kept)]
    expected = [*(law[text] * count for text in kept)]
    expected.append(count - sum(expected))
    assert len(kept) >= 5
    if expected[-1] < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_branches_that_the_target_starts_have_the_penalties_of_their_own_path() -> None:
    """Where one token is left of p there is one branch: the text is the definition's at temperature 0."""
    tree = TreeSettings(policy="mcsd", draw="sampled", fork=(2, 3), target_width=2)
    sampling = SamplingSettings(temperature=1.0, top_k=1, **HEAVY)
    for seed in range(12):
        sequence = processed_session(tree, sampling, seed=seed, has_grammar=True)
        greedy = SamplingSettings(**HEAVY)
        expected = reference(seed, greedy, [1, 2], seed=seed, has_grammar=True, num_tokens=NUM_TOKENS)
        assert text_of(sequence, [1, 2]) == expected


@pytest.mark.parametrize("tree", [*TREES, TreeSettings(policy="dyspec", size=5),
                                  TreeSettings(policy="mcsd", fork=(3, 3), target_width=2)])  # fmt: skip
@pytest.mark.parametrize("num_texts", [1, 3])
def test_logprobs_are_the_models_own_of_every_token_that_came(tree: TreeSettings, num_texts: int) -> None:
    """Before bias, penalties, grammar, temperature and truncation; alone and together, by any rule."""
    batch, steps = batch_of(tree)(), dict[Sequence, list[Any]]()
    for seed in range(num_texts):
        sampling = SamplingSettings(temperature=0.8, top_k=4, **HEAVY)
        sequence = processed_session(tree, sampling, seed=seed, has_grammar=True, num_logprobs=2)
        batch.enter(sequence, [seed, 5])
        steps[sequence] = []
    while batch.sequences:
        for outcome in batch.step():
            steps[outcome.sequence].append(outcome.step)
    for seed, own in enumerate(steps.values()):
        text = [seed, 5]
        for step in own:
            assert [told.token for told in step.logprobs] == list(step.tokens)
            for told in step.logprobs:
                log_p = table_logits(seed, tuple(text)).log_softmax(-1)
                assert told.logprob == pytest.approx(float(log_p[told.token]))
                assert [index for index, _ in told.top] == log_p.argsort(descending=True)[:2].tolist()
                text.append(told.token)


def test_nothing_is_kept_of_a_text_without_penalties_and_nobody_looks_at_its_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequence = processed_session(TREES[1], SamplingSettings(temperature=0.7, top_p=0.9), seed=0, has_grammar=False)
    assert sequence.processors is None
    assert sequence.drafter.process is None
    monkeypatch.setattr(accept, "on_paths", None)
    assert text_of(sequence, [1])
