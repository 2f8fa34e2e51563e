"""Merges in an order do what SentencePiece does by scores; they are made once, and again where they cannot be read."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from edgespec.pair import score_merges
from edgespec.pair.score_merges import FOLDER, cached_merges
from edgespec.user_paths import cache_folder

LETTERS = "abcd"


def random_vocabulary(chance: random.Random) -> tuple[list[str], list[float]]:
    """The letters, and words of them with scores in any order."""
    words = {"".join(chance.choices(LETTERS, k=chance.randint(2, 7))) for _ in range(60)}
    tokens = [*LETTERS, *sorted(words)]
    return tokens, [float(-number) for number in chance.sample(range(len(tokens)), len(tokens))]


def joined_by_scores(text: str, tokens: list[str], scores: list[float], apart: list[int]) -> list[int]:
    """SentencePiece's rule, step by step: the best whole of two neighbours first, the first of equal ones."""
    ids, parts = {token: number for number, token in enumerate(tokens)}, list(text)
    while True:
        wholes = [ids.get(left + right) for left, right in itertools.pairwise(parts)]
        found = [(-scores[n], place) for place, n in enumerate(wholes) if n is not None and n not in apart]
        if not found:
            return [ids[part] for part in parts]
        place = min(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.mark.parametrize("seed", range(20))
def test_merges_do_what_scores_do(seed: int) -> None:
    chance = random.Random(seed)
    tokens, scores = random_vocabulary(chance)
    ids = {token: number for number, token in enumerate(tokens)}
    apart = chance.sample(range(len(LETTERS), len(tokens)), 5)
    merges = cached_merges(tokens, ids, scores, apart)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    for _ in range(60):
        text = "".join(chance.choices(LETTERS, k=chance.randint(1, 24)))
        assert tokenizer.encode(text).ids == joined_by_scores(text, tokens, scores, apart)


def made(tokens: list[str], scores: list[float], apart: list[int] | None = None) -> list[tuple[str, str]]:
    ids = {token: number for number, token in enumerate(tokens)}
    return cached_merges(tokens, ids, scores, apart or [])


def test_they_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, scores = random_vocabulary(random.Random(0))
    first = made(tokens, scores)
    (kept,) = (cache_folder() / FOLDER).iterdir()
    with monkeypatch.context() as changed:
        changed.setattr(score_merges, "_merges", lambda *_: pytest.fail("made again"))
        assert made(tokens, scores) == first
    assert made(tokens, scores[::-1]) != first, "another vocabulary's are another file"
    assert made(tokens, scores, [10]) != first
    assert len(list((cache_folder() / FOLDER).iterdir())) == 3
    assert kept.exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "another's", "empty", "a folder"])
def test_what_cannot_be_used_is_made_again(damage: str) -> None:
    tokens, scores = random_vocabulary(random.Random(1))
    first = made(tokens, scores)
    (kept,) = (cache_folder() / FOLDER).iterdir()
    content = kept.read_bytes()
    changed = bytes([*content[:20], content[20] ^ 1, *content[21:]])
    if damage == "a folder":
        kept.unlink()
        kept.mkdir()
    else:
        kept.write_bytes(
            {"cut": content[:-3], "changed": changed, "another's": b"x" + content[1:], "empty": b""}[damage]
        )
    assert made(tokens, scores) == first
    assert kept.is_dir() or kept.read_bytes() == content


def test_a_home_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(score_merges, "cache_folder", lambda: tmp_path / "file" / "below")
    (tmp_path / "file").write_text("")
    tokens, scores = random_vocabulary(random.Random(2))
    assert made(tokens, scores) == made(tokens, scores)
