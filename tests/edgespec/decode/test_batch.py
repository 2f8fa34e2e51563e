"""Texts that share passes: what each yields is what it yields alone, whoever comes, goes or fails beside it."""

import functools
import itertools
import random
from collections import abc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode import reading as reading_module
from edgespec.decode.batch import Batch, _without_left
from edgespec.decode.loop import decode
from edgespec.decode.sequence import Sequence
from edgespec.decode.target_initialized import BranchedBatch
from edgespec.errors import EdgespecError
from edgespec.tree.settings import TreeSettings
from tests.edgespec.grow.tables import VOCAB, draft_logits, session_of, target_logits
from tests.support.table_models import RowOf

SEED = 3
PLAIN = TreeSettings(policy="none")
TREES = {
    Batch: [
        PLAIN,
        TreeSettings(size=6),
        TreeSettings(policy="opt-tree", size=9),
        TreeSettings(policy="chain", draft_tokens=3),
        TreeSettings(policy="dyspec", size=5),
    ],
    BranchedBatch: [
        TreeSettings(policy="mcsd", fork=(3, 3), target_width=2),
        TreeSettings(policy="mcsd", branching=(2, 1), target_width=3),
    ],
}
every_loop = pytest.mark.parametrize("loop", TREES)


def text_of(number: int, loop: type[Batch], *, failing: RowOf | None = None) -> tuple[Sequence, list[int]]:
    """A text whose prompt, length, sampling and trees follow from its number."""
    rng = random.Random(number)
    tree = rng.choice(TREES[loop])
    sampling = SamplingSettings(temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]))
    sequence = session_of(
        tree,
        sampling,
        target=failing or target_logits(SEED),
        draft=draft_logits(SEED),
        max_new_tokens=rng.randint(1, 30),
        seed=number,
        key=number,
    )
    return sequence, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]


@functools.cache
def alone(number: int, loop: type[Batch]) -> list[int]:
    sequence, prompt = text_of(number, loop)
    return [token for step in decode(sequence, prompt) for token in step.tokens]


def fails_behind(length: int) -> RowOf:
    """Logits that are no numbers behind texts of so many tokens."""
    right = target_logits(SEED)
    return lambda text: right(text) if len(text) < length else torch.full((VOCAB,), torch.nan, dtype=torch.float64)


@every_loop
@pytest.mark.parametrize("prompt_rows", [3, 2048])
def test_hundreds_of_steps_of_texts_that_come_and_go(
    prompt_rows: int, loop: type[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random arrivals, lengths, cancels and errors: every text is a beginning of what it is alone, or all of it."""
    monkeypatch.setattr(reading_module, "PROMPT_ROWS", prompt_rows)
    monkeypatch.setattr(reading_module, "ALL_PROMPT_ROWS", prompt_rows)
    rng = random.Random(11)
    batch, numbers = loop(), dict[Sequence, int]()
    texts: dict[int, list[int]] = {}
    failed, cancelled, ended = set[int](), set[int](), set[int]()
    next_number = 0
    for _ in range(250):
        while len(batch.sequences) < 12 and rng.random() < 0.4:
            failing = fails_behind(rng.randint(5, 25)) if rng.random() < 0.1 else None
            sequence, prompt = text_of(next_number, loop, failing=failing)
            batch.enter(sequence, prompt)
            numbers[sequence], texts[next_number] = next_number, []
            next_number += 1
        if batch.sequences and rng.random() < 0.05:
            victim = rng.choice(batch.sequences)
            batch.leave(victim)
            cancelled.add(numbers[victim])
        for outcome in batch.step():
            number = numbers[outcome.sequence]
            assert number not in cancelled
            if outcome.error is not None:
                assert isinstance(outcome.error, EdgespecError)
                failed.add(number)
                assert outcome.sequence not in batch.sequences
            if outcome.step is not None:
                texts[number] += outcome.step.tokens
                if outcome.step.finish is not None:
                    ended.add(number)
                    assert outcome.sequence not in batch.sequences
    assert len(ended) > 35
    assert len(failed) > 2
    assert len(cancelled) > 5
    for number, tokens in texts.items():
        whole = alone(number, loop)
        assert tokens == (whole if number in ended else whole[: len(tokens)])


@every_loop
def test_a_stop_token_ends_one_text_and_no_other(loop: type[Batch]) -> None:
    whole = [alone(number, loop) for number in range(8)]
    batch, numbers, found = loop(), dict[Sequence, int](), [list[int]() for _ in range(8)]
    for number in range(8):
        sequence, prompt = text_of(number, loop)
        if number % 2:
            middle = whole[number][len(whole[number]) // 2]
            sequence.settings = replace(sequence.settings, stop_tokens=frozenset({middle}))
            whole[number] = whole[number][: whole[number].index(middle) + 1]
        batch.enter(sequence, prompt)
        numbers[sequence] = number
    while batch.sequences:
        for outcome in batch.step():
            found[numbers[outcome.sequence]] += outcome.step.tokens
    assert found == whole


@every_loop
def test_what_ends_a_pass_leaves_every_text_as_it_was(loop: type[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out, or the disk fails, in a pass: nothing is lost and nothing repeated when it is made again.

    Where each text has a pass of its own, what the others gained before is told of in the next step.
    """
    whole = [alone(number, loop) for number in range(6)]
    batch, numbers, found = loop(), dict[Sequence, int](), [list[int]() for _ in range(6)]
    for number in range(6):
        sequence, prompt = text_of(number, loop)
        batch.enter(sequence, prompt)
        numbers[sequence] = number
    coupled = {number for sequence, number in numbers.items() if sequence.draws_coupled or _is_greedy(sequence)}
    num_steps = 0
    while batch.sequences:
        num_steps += 1
        if num_steps % 3 == 0:
            num_passes = 1 if loop is Batch else len(batch.sequences)
            with monkeypatch.context() as patch:
                _fail_in_pass(patch, batch, number=num_passes)
                with pytest.raises(MemoryError):
                    batch.step()
        for outcome in batch.step():
            found[numbers[outcome.sequence]] += outcome.step.tokens
    assert coupled, "some texts do not depend on how often trees were grown"
    for number in range(6):
        assert len(found[number]) == len(whole[number])
        if number in coupled:
            assert found[number] == whole[number]


def test_a_text_whose_draft_fails_in_a_pass_that_is_not_made_is_told_of_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = alone(0, Batch)
    batch = Batch()
    (first, prompt), (second, other_prompt) = text_of(0, Batch), text_of(7, Batch)
    assert second.drafter is not None
    batch.enter(first, prompt)
    batch.enter(second, other_prompt)
    found = [
        token for outcome in batch.step() if outcome.sequence is first and outcome.step for token in outcome.step.tokens
    ]

    def failing(_tokens: Tensor, _rows: Tensor) -> Tensor:
        raise EdgespecError("E_NAN_LOGITS", "no numbers.", "Try another.")

    monkeypatch.setattr(second.drafter, "expand", failing)
    with monkeypatch.context() as patch:
        _fail_in_pass(patch, batch, number=1)
        with pytest.raises(MemoryError):
            batch.step()
    errors = []
    while batch.sequences:
        for outcome in batch.step():
            if outcome.sequence is second:
                errors.append(outcome.error)
            elif outcome.step is not None:
                found += outcome.step.tokens
    assert [type(error) for error in errors] == [EdgespecError]
    assert found == whole


def test_a_head_that_runs_out_of_memory_behind_some_texts_loses_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No text gains anything of that pass, and the next one makes it again."""
    whole = [alone(number, Batch) for number in range(8)]
    batch, found = Batch(), [list[int]() for _ in range(8)]
    numbers: dict[Sequence, int] = {}
    for number in range(8):
        sequence, prompt = text_of(number, Batch)
        batch.enter(sequence, prompt)
        numbers[sequence] = number
    calls = 0
    logits = type(next(iter(numbers)).target).logits

    def limited(self: object, hidden: Tensor, runs: object = None) -> Tensor:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise MemoryError
        return logits(self, hidden, runs)

    num_failed = 0
    for outcome in batch.step():
        found[numbers[outcome.sequence]] += outcome.step.tokens
    monkeypatch.setattr(type(next(iter(numbers)).target), "logits", limited)
    while batch.sequences:
        try:
            outcomes = batch.step()
        except MemoryError:
            num_failed += 1
            continue
        for outcome in outcomes:
            found[numbers[outcome.sequence]] += outcome.step.tokens
    assert num_failed > 3
    for sequence, number in numbers.items():
        if sequence.draws_coupled or _is_greedy(sequence):
            assert found[number] == whole[number]


def _is_greedy(sequence: Sequence) -> bool:
    return sequence.settings.sampling.temperature == 0


def _fail_in_pass(patch: pytest.MonkeyPatch, batch: Batch, *, number: int) -> None:
    """Passes run out of memory from that one on."""
    target, numbers = type(batch.sequences[0].target), itertools.count(1)
    read = target.read

    def limited(self: object, parts: abc.Sequence[object]) -> list[Tensor]:
        if next(numbers) >= number:
            raise MemoryError
        return read(self, parts)

    patch.setattr(target, "read", limited)


def test_texts_that_stay_in_a_pass_keep_their_own_rows_when_others_leave_it() -> None:
    """Rows of trees stand before those of prompts."""
    for left in itertools.product([False, True], repeat=3):
        texts: list[Any] = [
            SimpleNamespace(number=number, target=SimpleNamespace(is_left_out=has_left))
            for number, has_left in enumerate(left)
        ]
        first, second, read = texts
        prompts: list[Any] = [SimpleNamespace(sequence=read)]
        found = _without_left(texts, texts, [(first, None), (second, None)], prompts)
        staying = [text for text in texts if not text.target.is_left_out]
        assert found[0] == found[1] == staying
        assert [text for text, _ in found[2]] + [prompt.sequence for prompt in found[3]] == staying


def test_prompts_are_read_beside_trees_and_share_the_rows_that_a_pass_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt enters in pieces; texts under way gain tokens in each of these passes."""
    monkeypatch.setattr(reading_module, "PROMPT_ROWS", 4)
    batch = Batch()
    first = session_of(
        PLAIN, SamplingSettings(), target=target_logits(SEED), draft=draft_logits(SEED), max_new_tokens=40
    )
    batch.enter(first, [1, 2, 3])
    batch.step()
    late = session_of(PLAIN, SamplingSettings(), target=target_logits(SEED), draft=draft_logits(SEED), max_new_tokens=5)
    batch.enter(late, list(range(10)))
    passes = [[outcome.sequence for outcome in batch.step()] for _ in range(4)]
    assert passes == [[first], [first], [first, late], [first, late]]


class Asked:
    """Tuning that is idle from its second step on, and counts what it is asked and told."""

    def __init__(self) -> None:
        self.begun, self.learned, self.is_idle = 0, 0, False

    def begin_step(self, number: int, num_texts: int, num_unread: int) -> None:
        self.begun += 1
        self.is_idle = self.begun > 1

    def learn(self, step: object) -> None:
        self.learned += 1

    def observe(self, cost: object) -> None:
        pass

    take_tree = observe


def test_steps_of_roots_alone_are_tuned_ever_more_seldom_until_another_text_comes() -> None:
    sequences, tunings, batch = list[Sequence](), list[Asked](), Batch()
    for number in range(3):
        sequence = session_of(
            PLAIN, SamplingSettings(temperature=0.0), target=target_logits(SEED), draft=draft_logits(SEED),
            max_new_tokens=80, seed=number, key=number,
        )  # fmt: skip
        tunings.append(Asked())
        sequences.append(sequence)
        sequence.tuning = tunings[-1]
    for sequence in sequences[:2]:
        batch.enter(sequence, [1, 2])
    batch.step()
    counts = []
    for _ in range(46):
        batch.step()
        counts.append((tunings[0].begun, tunings[0].learned))
    assert counts == [(n, n) for n in [1, *9 * [2], *17 * [3], *17 * [4], 5, 5]]
    assert tunings[1].begun == tunings[0].begun
    batch.enter(sequences[2], [3])
    batch.step()
    assert tunings[0].begun == 6, "a prompt is read"
    batch.step()
    assert tunings[0].begun == 7, "it has another text beside it"
    batch.leave(sequences[1])
    batch.step()
    assert tunings[0].begun == 8


def test_steps_of_roots_alone_ask_for_no_growth_between() -> None:
    sequence = session_of(
        TreeSettings(size=6), SamplingSettings(temperature=0.0), target=target_logits(SEED), draft=draft_logits(SEED),
        max_new_tokens=60,
    )  # fmt: skip
    sequence.tuning, grown, grow, batch = Asked(), list[int](), sequence.plain, Batch()
    sequence.grow = lambda root, depth: (grown.append(root), grow(root, depth))[1]
    batch.enter(sequence, [1, 2])
    drafted = [batch.step()[0].step.num_drafted for _ in range(14)]
    assert len(grown) == 3
    assert set(drafted) == {0}


def test_trees_that_nothing_tunes_grow_in_every_step() -> None:
    sequence = session_of(
        TreeSettings(size=6), SamplingSettings(temperature=0.0), target=target_logits(SEED), draft=draft_logits(SEED),
        max_new_tokens=60,
    )  # fmt: skip
    batch = Batch()
    batch.enter(sequence, [1, 2])
    batch.step()
    assert all(batch.step()[0].step.num_drafted for _ in range(9))
