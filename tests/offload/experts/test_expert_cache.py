"""Experts that are asked for often and lately stay; those in use always do."""

import random

import pytest

from offload.experts.expert_cache import ExpertCache


def cache_of(room: int, *, layers: int = 3, experts: int = 8) -> ExpertCache:
    return ExpertCache([10] * layers, num_experts=experts, capacity_bytes=10 * room)


def use(cache: ExpertCache, row: int, *experts: int) -> int:
    """Ask for experts and bring those that are missing, one after the other; return how many were there."""
    kept = cache.request(row, experts)
    for expert in kept:
        cache.release(row, expert)
    for expert in set(experts) - set(kept):
        assert cache.admit(row, expert) is not None
        cache.release(row, expert)
    return len(kept)


def test_nothing_leaves_where_all_have_room() -> None:
    cache = cache_of(24)
    for row in range(3):
        use(cache, row, *range(8))
    assert [use(cache, row, *range(8)) for row in range(3)] == [8, 8, 8]
    assert cache.used_bytes == 240


def test_the_expert_that_was_asked_for_last_outlives_older_ones() -> None:
    cache = cache_of(2, layers=2)
    use(cache, 0, 1)
    use(cache, 1, 2)
    use(cache, 0, 3)  # a new pass; of experts asked for once, the older one leaves
    assert [cache.is_kept(*key) for key in ((0, 1), (1, 2), (0, 3))] == [False, True, True]


def test_an_expert_that_was_asked_for_often_outlives_newer_ones() -> None:
    cache = cache_of(2, layers=2)
    for _ in range(4):
        use(cache, 0, 1)
        use(cache, 1, 1)
    use(cache, 0, 5)
    use(cache, 1, 6)
    use(cache, 0, 7)
    kept = [key for key in ((0, 1), (1, 1), (0, 5), (1, 6), (0, 7)) if cache.is_kept(*key)]
    assert len(kept) == 2
    assert {(0, 1), (1, 1)} & set(kept)


def test_use_is_the_share_of_passes_that_asked_for_an_expert() -> None:
    cache = cache_of(6, layers=2, experts=3)
    assert cache.use() == ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    for chunks in ([(0, 1), (1, 2)], [(1,)], [(1,)], [(1,)]):  # of the first layer, pass by pass
        for experts in chunks:
            use(cache, 0, *experts)
        use(cache, 1, 0)
    assert cache.use() == ((0.25, 1.0, 0.25), (1.0, 0.0, 0.0))


def test_what_is_not_asked_for_any_more_leaves_in_the_end() -> None:
    cache = cache_of(4, layers=2)
    for _ in range(30):
        use(cache, 0, 0)
        use(cache, 1, 0)
    for _ in range(200):
        use(cache, 0, 1, 2)
        use(cache, 1, 1, 2)
    assert not cache.is_kept(0, 0)
    assert not cache.is_kept(1, 0)


def test_experts_in_use_stay_and_there_is_room_only_after_one_is_released() -> None:
    cache = cache_of(2)
    assert cache.request(0, [1, 2, 3]) == []
    assert cache.admit(0, 1) == []
    assert cache.admit(0, 2) == []
    assert cache.admit(0, 3) is None
    cache.release(0, 2)
    assert cache.admit(0, 3) == [(0, 2)]


def test_experts_of_the_same_layer_leave_last() -> None:
    """The next rows of a prompt pass the same layer."""
    cache = cache_of(4, layers=2)
    for _ in range(20):
        use(cache, 0, 4)
        use(cache, 1, 6, 7)
    use(cache, 0, 0, 1, 2, 3)
    assert all(cache.is_kept(0, expert) for expert in range(4))


def test_one_expert_is_admitted_where_there_is_room_for_none() -> None:
    cache = cache_of(0)
    assert cache.admit(0, 1) == []
    assert cache.admit(0, 2) is None
    cache.release(0, 1)
    assert cache.admit(0, 2) == [(0, 1)]


def test_a_forgotten_expert_takes_no_room() -> None:
    cache = cache_of(1)
    cache.request(0, [1])
    cache.admit(0, 1)
    cache.forget(0, 1)
    assert (cache.used_bytes, cache.is_kept(0, 1)) == (0, False)
    assert cache.admit(0, 2) == []


def test_sizes_may_differ_by_layer() -> None:
    cache = ExpertCache([10, 25], num_experts=4, capacity_bytes=40)
    for expert in range(4):
        use(cache, 0, expert)
    use(cache, 1, 0)
    assert cache.used_bytes <= 40
    assert cache.is_kept(1, 0)


@pytest.mark.parametrize("room", [16, 32, 64])
def test_skewed_routers_hit_more_often_than_with_the_least_recently_used_alone(room: int) -> None:
    """Eight layers of 32 experts, 4 a pass: some are popular, and one of a pass's four comes again in the next."""
    chosen = random.Random(1)
    popularity = [[1 / (1 + place) for place in chosen.sample(range(32), 32)] for _ in range(8)]
    cache, hits = cache_of(room, layers=8, experts=32), 0
    recent: dict[tuple[int, int], None] = {}
    recent_hits = 0
    last: list[list[int]] = [[] for _ in range(8)]
    for _ in range(200):
        for row in range(8):
            experts = set(last[row] and chosen.sample(last[row], 1))
            while len(experts) < 4:
                experts.update(chosen.choices(range(32), popularity[row]))
            last[row] = sorted(experts)
            hits += use(cache, row, *last[row])
            for expert in last[row]:
                recent_hits += (row, expert) in recent
                recent.pop((row, expert), None)
                recent[row, expert] = None
                if len(recent) > room:
                    del recent[next(iter(recent))]
    assert hits > 1.02 * recent_hits
