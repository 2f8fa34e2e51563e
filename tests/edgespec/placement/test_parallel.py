"""How many texts are under way where memory is scarce."""

from dataclasses import replace
from functools import partial

import pytest

from edgespec.config import MemoryLimits
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.parallel import PassShares, Workload, with_texts, with_workload
from edgespec.placement.place import pair_weights, place_weights, read_memory
from edgespec.placement.run_config import RunConfig, resolve_run_config
from edgespec.tree.settings import TreeSettings
from offload.placement import Placement

TREE = TreeSettings(policy="none")
GUESS = PassShares()


@pytest.fixture
def pair() -> ModelPair:
    return open_pair(None, None)


def limited(pair: ModelPair, num_bytes: int | None) -> RunConfig:
    limits = MemoryLimits(max_cpu_bytes=num_bytes)
    return resolve_run_config(
        pair.target, pair.max_context, draft=pair.draft, limits=limits, context_tokens=1024, device="cpu"
    )


def placement(pair: ModelPair, run_config: RunConfig) -> Placement:
    weights = pair_weights(pair.target, None, run_config)
    return place_weights(weights, TREE, run_config, read_memory(run_config.limits, run_config.device)).placement


def texts(pair: ModelPair, run_config: RunConfig, shares: PassShares = GUESS, *, num_waiting: int = 16) -> int:
    workload = Workload(num_waiting=num_waiting, mean_tokens=512)
    return with_workload(run_config, workload, place=partial(placement, pair), shares=shares).num_texts


def test_a_number_that_the_user_gave_is_taken_but_for_texts_that_there_are_not(pair: ModelPair) -> None:
    run_config = limited(pair, None)
    for num_texts, num_waiting, expected in ((4, 16, 4), (4, 3, 3), (1, 16, 1), (4, 0, 1)):
        workload = Workload(num_waiting=num_waiting, mean_tokens=512, num_texts=num_texts)
        found = with_workload(run_config, workload, place=lambda _: pytest.fail("nothing is placed"), shares=GUESS)
        assert found == (with_texts(run_config, expected, 512) if expected > 1 else run_config)


def test_with_memory_for_all_as_many_texts_are_under_way_as_wait(pair: ModelPair) -> None:
    run_config = limited(pair, None)
    assert texts(pair, run_config) == 16
    assert texts(pair, run_config, num_waiting=3) == 3
    assert texts(pair, run_config, num_waiting=1) == 1


def test_a_text_more_is_weighed_against_the_layers_that_its_cache_would_displace(pair: ModelPair) -> None:
    wide = limited(pair, None)
    streamed = with_texts(replace(wide, limits=MemoryLimits(max_resident_layers=0)), 16, 512)
    layer_bytes = max(record.cpu_bytes for record in pair_weights(pair.target, None, wide).target.skeleton.records)
    run_config = limited(pair, placement(pair, streamed).planned_bytes + 2 * layer_bytes)
    assert placement(pair, run_config).num_resident == placement(pair, run_config).num_layers
    assert 0 < placement(pair, with_texts(run_config, 16, 512)).num_resident < placement(pair, run_config).num_layers
    assert texts(pair, run_config, PassShares(resident=0.9)) == 16, "streaming costs hardly more"
    assert 1 < texts(pair, run_config, PassShares(resident=0.001, text=0.001)) < 16, "resident layers cost nothing"


def test_texts_whose_trees_shrink_among_others_count_for_what_they_still_yield() -> None:
    shares = PassShares(tokens_left=0.5, at_texts=16)
    assert [shares.tokens(count) for count in (1, 4, 16)] == pytest.approx([1, 4 * 0.5**0.5, 8])
