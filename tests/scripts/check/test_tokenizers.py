"""The check of tokenizers counts what differs and what is raised."""

from __future__ import annotations

import random

import pytest

from edgespec.text.token_text import TokenText
from scripts.check.tokenizers import KINDS, Counts, check_kind, random_ids

KIND = "WordLevel, no decoder"


def outcome(counts: Counts) -> tuple[int, int]:
    """The number of texts that raised something, and of those that differ."""
    assert counts.texts >= 3
    assert counts.tokens >= 1000
    return counts.raised, counts.differing


def test_no_text_differs_and_nothing_is_raised() -> None:
    assert outcome(check_kind(KINDS[KIND](), num_tokens=1000, seed=0)) == (0, 0)


def test_texts_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenText, "rest", lambda _: "other")
    counts = check_kind(KINDS[KIND](), num_tokens=1000, seed=0)
    assert outcome(counts) == (0, counts.texts)


def test_what_is_raised_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TokenText, "rest")
    counts = check_kind(KINDS[KIND](), num_tokens=1000, seed=0)
    assert outcome(counts) == (counts.texts, 0)


def test_ids_that_are_no_token_are_among_the_random_ones() -> None:
    ids = random_ids(random.Random(1), 5)
    assert {min(ids), max(ids)} == {-3, 7}
