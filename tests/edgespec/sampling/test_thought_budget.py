"""A budget of thought to the token, behind the text and behind every node's path."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from edgespec.sampling.thought_budget import CUT_CHARACTER, BudgetMatcher, ThoughtBudget

WORDS = ("<think>", "</think>", "a", "b", " so", "\n", CUT_CHARACTER)
OPEN, CLOSE, A, B, SO, LINE, PART = range(len(WORDS))
BUDGET = ThoughtBudget(
    most=3, close=(SO, LINE, CLOSE), marks=("<think>", "</think>"), is_open=True, reopens=False,
    decode=lambda tokens: "".join(WORDS[token] for token in tokens),
)  # fmt: skip


def only(budget: ThoughtBudget, text: Sequence[int], path: Sequence[int] = ()) -> int | None:
    """The only token that may follow; None for any."""
    matcher = BudgetMatcher(budget, None, vocab=len(WORDS))
    matcher.add(text)
    allowed = matcher.allowed(path)
    if allowed is None:
        return None
    (token,) = allowed.nonzero().flatten().tolist()
    return int(token)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_behind_exactly_so_many_tokens_only_the_words_that_close_the_thought_may_come(most: int) -> None:
    budget = replace(BUDGET, most=most)
    for count in range(most):
        assert only(budget, [A] * count) is None
    text = [A] * most
    for token in budget.close:
        assert only(budget, text) == token
        text.append(token)
    for _ in range(3):
        assert only(budget, text) is None, "the answer is free"
        text.append(A)


def test_a_thought_that_ends_by_itself_is_followed_by_anything() -> None:
    assert only(BUDGET, [A, A, CLOSE]) is None
    assert only(BUDGET, [A, CLOSE, *[B] * 9]) is None


def test_all_thoughts_share_the_tokens_where_several_may_come() -> None:
    text = [A, CLOSE, B, OPEN, A]  # the mark that closes counts
    assert only(replace(BUDGET, reopens=True), text) == SO
    assert only(BUDGET, text) is None, "what is no thought has no bound"


def test_a_text_that_does_not_begin_with_the_mark_does_not_think() -> None:
    closed = replace(BUDGET, is_open=False)
    assert only(closed, [LINE, OPEN, A, A]) is None
    assert only(closed, [LINE, OPEN, A, A, A]) == SO
    assert only(closed, [B, OPEN, A, A, A, A]) is None


def test_a_character_that_is_cut_is_ended_first() -> None:
    assert only(BUDGET, [A, A, PART]) is None
    assert only(BUDGET, [A, A, PART, B]) == SO


def test_behind_a_path_comes_what_comes_behind_the_same_text() -> None:
    text = [A, B, A, SO, LINE, CLOSE, A]
    matcher = BudgetMatcher(BUDGET, None, vocab=len(WORDS))
    for end in range(len(text)):
        for path in ((), tuple(text[end : end + 2]), (B,), (B, B), (CLOSE,), (SO, LINE, CLOSE)):
            allowed = matcher.allowed(path)
            found = None if allowed is None else int(allowed.int().argmax())
            assert found == only(BUDGET, [*text[:end], *path]), (text[:end], path)
        matcher.add([text[end]])
