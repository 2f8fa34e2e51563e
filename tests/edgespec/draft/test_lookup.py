"""What is looked up in text, against reading the text from its beginning."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest

from edgespec.draft.lookup import MOST_CORPUS_TOKENS, MOST_TOKENS, Corpus, LookedUp, TextLookup, lookup_bytes
from edgespec.draft.suffix_automaton import BYTES_A_TOKEN, SuffixAutomaton


def random_text(seed: int, *, length: int, vocab: int) -> list[int]:
    """Tokens that repeat passages of their own."""
    rng, text = random.Random(seed), list[int]()
    while len(text) < length:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randint(1, 12)]
        else:
            text.append(rng.randrange(vocab))
    return text[:length]


def followers(text: Sequence[int], ending: Sequence[int]) -> Counter[int]:
    """How often each token stands behind these tokens."""
    size = len(ending)
    places = range(len(text) - size)
    return Counter(text[at + size] for at in places if list(text[at : at + size]) == list(ending))


def paths_of(found: Sequence[LookedUp]) -> list[tuple[int, ...]]:
    """Every candidate as the tokens down to it."""
    paths: list[tuple[int, ...]] = []
    for one in found:
        above = () if one.parent < 0 else paths[one.parent]
        paths.append((*above, one.token))
    return paths


@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_the_longest_ending_that_stood_before_is_known_with_how_often_each_token_followed(vocab: int) -> None:
    text, automaton = random_text(vocab, length=60, vocab=vocab), SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        read = text[:end]
        longest = max(size for size in range(end) if size == 0 or followers([*read, -9], read[-size:]).total() > 1)
        state = automaton.links[automaton.last]
        assert automaton.lengths[state] == longest
        if longest:
            counts = {token: automaton.counts[behind] for token, behind in automaton.transitions[state].items()}
            assert counts == followers(read, read[-longest:])


@pytest.mark.parametrize("has_corpus", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_candidates_have_followed_the_texts_end_and_stand_in_a_tree_by_their_chance(
    seed: int, has_corpus: bool
) -> None:
    """Each token has followed the one before it, in the text itself or in one text of the corpus."""
    text, others = random_text(seed, length=200, vocab=6), [random_text(seed + 50, length=90, vocab=6), [1, 2, 3]]
    corpus = Corpus() if has_corpus else None
    for other in others if corpus is not None else ():
        corpus.add(other)
    lookup = TextLookup(corpus)
    lookup.begin(text[:120])
    lookup.candidates(8, depth=4, least=0.0)
    lookup.add(text[120:])
    found = lookup.candidates(40, depth=9, least=0.01)
    texts = [text, *others] if has_corpus else [text]
    assert len(found) > 5
    for path in paths_of(found):
        assert any(followers(one, [text[-1], *path][-2:-1])[path[-1]] for one in texts)
    assert all(one.layer == len(path) <= 9 for one, path in zip(found, paths_of(found), strict=True))
    assert len(set(paths_of(found))) == len(found)
    chances = [one.chance for one in found]
    assert chances == sorted(chances, reverse=True)
    assert min(chances) >= 0.01
    for parent in range(-1, len(found)):
        below = sum(one.chance for one in found if one.parent == parent)
        assert below <= (1.0 if parent < 0 else chances[parent]) + 1e-9


@pytest.mark.parametrize("has_corpus", [False, True])
@pytest.mark.parametrize("least", [0.05, 0.2, 0.5])
def test_a_larger_least_chance_leaves_out_the_candidates_below_it_alone(least: float, has_corpus: bool) -> None:
    for seed in range(6):
        corpus = Corpus() if has_corpus else None
        if corpus is not None:
            corpus.add(random_text(seed + 50, length=90, vocab=6))
        lookup = TextLookup(corpus)
        lookup.begin(random_text(seed, length=200, vocab=6))
        whole = lookup.candidates(500, depth=6, least=0.001)
        assert lookup.candidates(500, depth=6, least=least) == [one for one in whole if one.chance >= least]


def test_a_copy_is_found_in_one_chain_and_its_chance_is_learned() -> None:
    passage = list(range(100, 160))
    lookup = TextLookup()
    lookup.begin([*passage, 1, *passage[:3]])
    first = lookup.candidates(20, depth=20, least=0.001)
    assert paths_of(first)[-1] == tuple(passage[3:23])
    lookup.add(passage[3:36])
    later = lookup.candidates(20, depth=20, least=0.001)
    assert later[-1].chance > first[-1].chance


def test_where_nothing_comes_true_nothing_is_proposed_any_more() -> None:
    rng, lookup = random.Random(0), TextLookup()
    lookup.begin([rng.randrange(40) for _ in range(400)])
    proposed = []
    for _ in range(300):
        proposed.append(len(lookup.candidates(16, depth=8, least=0.2)))
        lookup.add([rng.randrange(40)])
    assert sum(proposed[:30]) > 5 * sum(proposed[-100:]) / 100 * 30 or sum(proposed[-100:]) == 0


@pytest.mark.parametrize("has_corpus", [False, True])
@pytest.mark.parametrize("vocab", [3, 9, 70_000])
def test_a_text_repeats_itself_where_its_last_tokens_stood_before(vocab: int, has_corpus: bool) -> None:
    """Bytes of two tokens that look like a third's are none."""
    names = [0x01000100, 0x00010001, 0x01000000, 0x00000100, *range(4, vocab)]
    for seed in range(20):
        ids = [names[token] for token in random_text(seed, length=60, vocab=vocab)]
        others = [names[token] for token in random_text(seed + 90, length=60, vocab=vocab)]
        corpus = Corpus() if has_corpus else None
        if corpus is not None:
            corpus.add(others)
        lookup = TextLookup(corpus)
        lookup.begin(ids[:20])
        for end in range(20, len(ids)):
            pairs = set(itertools.pairwise(ids[: end - 1]))
            pairs |= set(itertools.pairwise(others)) if has_corpus else set()
            assert lookup.repeats() == ((ids[end - 2], ids[end - 1]) in pairs)
            lookup.add(ids[end : end + 1])


def test_a_text_of_one_token_does_not_repeat_itself() -> None:
    lookup = TextLookup()
    lookup.begin([7])
    assert not lookup.repeats()
    lookup.add([7, 7])
    assert lookup.repeats()


def test_a_text_that_begins_again_has_forgotten_what_was_dropped() -> None:
    lookup = TextLookup()
    lookup.begin([1, 2, 3, 4])
    lookup.candidates(4, depth=4, least=0.0)
    lookup.add([7, 8, 9, 1, 2])
    lookup.begin([1, 2, 3, 1, 2])
    assert paths_of(lookup.candidates(9, depth=2, least=0.0)) == [(3,), (3, 1)]


def test_a_corpus_ends_at_its_bound_and_says_how_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.draft.lookup.MOST_CORPUS_TOKENS", 10)
    corpus = Corpus()
    corpus.add([1] * 6)
    corpus.add([2] * 6)
    assert corpus.num_left_out == 3


@pytest.mark.parametrize("vocab", [4, 5000])
def test_a_text_takes_the_memory_that_is_planned_for_it(vocab: int) -> None:
    text = random_text(3, length=6000, vocab=vocab)
    tracemalloc.start()
    try:
        automaton = SuffixAutomaton()
        automaton.extend(text)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    planned = lookup_bytes(len(text), num_texts=1)
    assert 0.6 * planned < taken <= planned
    assert lookup_bytes(10 * MOST_TOKENS, num_texts=2) == 2 * lookup_bytes(MOST_TOKENS, num_texts=1)
    assert lookup_bytes(0, num_texts=1, corpus_tokens=2 * MOST_CORPUS_TOKENS) == BYTES_A_TOKEN * MOST_CORPUS_TOKENS
