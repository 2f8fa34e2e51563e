"""How many texts are under way where memory is scarce."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.config import MemoryLimits
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.parallel import PassShares, texts_that_pay, with_texts
from edgespec.placement.place import pair_weights, place_weights, read_memory
from edgespec.placement.run_place import RunPlace, resolve_place
from edgespec.tree.settings import TreeSettings
from offload.placement import Placement

TREE = TreeSettings(policy="none")
GUESS = PassShares()


@pytest.fixture
def pair() -> ModelPair:
    return open_pair(None, None)


def limited(pair: ModelPair, num_bytes: int | None) -> RunPlace:
    limits = MemoryLimits(max_cpu_bytes=num_bytes)
    return resolve_place(pair.target.config, pair.max_context, limits=limits, context_tokens=1024, device="cpu")


def placement(pair: ModelPair, place: RunPlace) -> Placement:
    weights = pair_weights(pair.target, None, place)
    return place_weights(weights, TREE, place, read_memory(place.limits, place.device)).placement


def texts(pair: ModelPair, place: RunPlace, shares: PassShares = GUESS, *, num_waiting: int = 16) -> int:
    return texts_that_pay(pair, place, TREE, num_waiting=num_waiting, mean_tokens=512, shares=shares).num_texts


def test_with_memory_for_all_as_many_texts_are_under_way_as_wait(pair: ModelPair) -> None:
    place = limited(pair, None)
    assert texts(pair, place) == 16
    assert texts(pair, place, num_waiting=3) == 3
    assert texts(pair, place, num_waiting=1) == 1


def test_a_text_more_is_weighed_against_the_layers_that_its_cache_would_displace(pair: ModelPair) -> None:
    wide = limited(pair, None)
    streamed = with_texts(replace(wide, limits=MemoryLimits(max_resident_layers=0)), 16, 512)
    layer_bytes = max(record.cpu_bytes for record in pair_weights(pair.target, None, wide).target.skeleton.records)
    place = limited(pair, placement(pair, streamed).planned_bytes + 2 * layer_bytes)
    assert placement(pair, place).num_resident == placement(pair, place).num_layers
    assert 0 < placement(pair, with_texts(place, 16, 512)).num_resident < placement(pair, place).num_layers
    assert texts(pair, place, PassShares(resident=0.9)) == 16, "streaming costs hardly more"
    assert 1 < texts(pair, place, PassShares(resident=0.001, text=0.001)) < 16, "resident layers cost nothing"


def test_texts_whose_trees_shrink_in_company_count_for_what_they_still_yield() -> None:
    shares = PassShares(tokens_left=0.5, at_texts=16)
    assert [shares.tokens(count) for count in (1, 4, 16)] == pytest.approx([1, 4 * 0.5**0.5, 8])
