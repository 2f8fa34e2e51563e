"""Rows of texts that have ended: which of them stay, and what a text takes of them."""

import pytest
import torch

from edgespec.model.text_cache import TextCache
from edgespec.prefix_cache.caches import TextCaches
from edgespec.prefix_cache.in_memory import CacheBudget, PrefixCache

ROOM = CacheBudget(num_texts=4, num_tokens=1000)


def text_of(ids: list[int]) -> TextCaches:
    cache = TextCache(1)
    rows = torch.tensor(ids, dtype=torch.float32)[None, None, :, None]
    cache.layers[0].append(rows, rows)
    cache.commit_next(ids)
    return TextCaches(target=cache, draft=None)


def kept(*texts: list[int], num_prompt_tokens: int = 30) -> PrefixCache:
    found = PrefixCache(between_steps=lambda call: call())
    for ids in texts:
        found.keep(text_of(ids), num_prompt_tokens=num_prompt_tokens)
    return found


def first_ids(cache: PrefixCache, *texts: list[int]) -> list[int]:
    return [ids[0] for ids in texts if cache.has(ids)]


TEXTS = [[number * 100 + place for place in range(40)] for number in range(1, 4)]


@pytest.mark.parametrize("bound", ["bytes", "tokens", "texts"])
def test_the_oldest_go_first(bound: str) -> None:
    cache = kept(*TEXTS)
    cache.most_bytes = cache.num_bytes // 3 * 2 if bound == "bytes" else None
    rooms = {"tokens": CacheBudget(num_texts=4, num_tokens=80)}
    rooms["texts"] = CacheBudget(num_texts=2, num_tokens=1000, allows_more=False)
    cache.fit(rooms.get(bound, ROOM))
    assert first_ids(cache, *TEXTS) == [200, 300]


def test_a_later_turn_takes_its_own_rows_and_leaves_the_others() -> None:
    cache = kept(*TEXTS)
    assert list(cache.take([*TEXTS[1], 1, 2], ROOM).target.ids) == TEXTS[1]
    assert first_ids(cache, *TEXTS) == [100, 300]


def test_another_conversation_with_the_same_beginning_gets_a_copy_of_that() -> None:
    cache = kept(*TEXTS)
    found = cache.take([*TEXTS[1][:20], 1, 2], ROOM)
    assert list(found.target.ids) == TEXTS[1][:20]
    assert first_ids(cache, *TEXTS) == [100, 200, 300]
    found.target.layers[0].storage[0].zero_()
    assert cache.take(TEXTS[1], ROOM).target.layers[0].rows(40)[0].flatten().tolist() == TEXTS[1]


def test_a_text_that_begins_otherwise_takes_nothing() -> None:
    cache = kept(*TEXTS)
    assert cache.take([7, *TEXTS[0]], ROOM) is None
    assert len(cache) == 3
