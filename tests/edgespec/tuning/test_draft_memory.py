"""What runs learn of a draft is one rate a pair, that of Sequoia's law, and a mean tree's seconds: means, on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import edgespec.engine as engine_module
from edgespec import Engine, TreeSettings
from edgespec.grow.sequoia import power_law, sequoia_table
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.kept_speed import growth_place
from edgespec.tuning.costs import GrowthCosts
from edgespec.tuning.draft_memory import (
    LEAST_TIMED,
    LEAST_TREES,
    MOST_TREES,
    keep_learned,
    learned_growth,
    learned_rate,
    let_age,
    rate_of,
)
from edgespec.tuning.draft_worth import DraftWorth, SeenTrees
from edgespec.user_paths import cache_folder


def of_trees(num_trees: int, tokens: float) -> DraftWorth:
    """Chains of two nodes."""
    worth = DraftWorth()
    worth.seen = SeenTrees(num_trees, round(num_trees * tokens), 2 * num_trees, 2 * num_trees)
    return worth


@pytest.fixture
def pair(pair_folders: tuple[Path, Path]) -> ModelPair:
    return open_pair(*pair_folders)


def kept(pair: ModelPair) -> float:
    assert pair.draft is not None
    return learned_rate(pair.target, pair.draft).rate


def keep(pair: ModelPair, *worths: DraftWorth) -> None:
    assert pair.draft is not None
    keep_learned(pair.target, pair.draft, worths)


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.95])
@pytest.mark.parametrize(("nodes", "layers"), [(1, 1), (16, 4), (64, 20)])
def test_a_rate_is_the_one_by_which_trees_yield_as_much(rate: float, nodes: int, layers: int) -> None:
    rates = power_law(rate)
    table = sequoia_table(rates, size=nodes, depth=layers, max_children=len(rates))
    assert rate_of(table.expected_tokens(nodes, layers), nodes=nodes, layers=layers) == pytest.approx(rate, abs=3e-3)


def test_runs_count_by_their_trees(pair: ModelPair) -> None:
    keep(pair, of_trees(100, 1.0))
    first = kept(pair)
    keep(pair, of_trees(50, 0.2), of_trees(50, 0.2))
    low = rate_of(1.2, nodes=2, layers=2)
    assert kept(pair) == pytest.approx((first + low) / 2)
    keep(pair, of_trees(100 * MOST_TREES, 0.2))  # what was learned long ago ends no new trend
    assert kept(pair) == pytest.approx(low, abs=0.01)


def test_few_trees_say_nothing_until_those_of_several_runs_are_enough(pair: ModelPair) -> None:
    """A draft that is asked a few times a run would count as its kind does for ever, however bad it is here."""
    assert pair.draft is not None
    for run in range(LEAST_TREES // 2):
        assert learned_rate(pair.target, pair.draft) is None, f"run {run}"
        assert learned_growth(pair.target, pair.draft, "here") is None
        growth = took(2, 2, 0.5, num_trees=LEAST_TIMED)
        keep_learned(pair.target, pair.draft, [of_trees(2, 0.5)], growth, place="here")
    assert kept(pair) == pytest.approx(rate_of(1.5, nodes=2, layers=2))
    found = learned_growth(pair.target, pair.draft, "here")
    assert (found.num_trees, found.seconds) == (LEAST_TREES, pytest.approx(0.5, rel=0.05))


def test_what_the_first_trees_of_a_process_took_never_counts(pair: ModelPair) -> None:
    assert pair.draft is not None
    for _ in range(LEAST_TREES):
        growth = took(2, 2, 50.0, num_trees=LEAST_TIMED - 1)
        keep_learned(pair.target, pair.draft, [of_trees(2, 0.5)], growth, place="here")
    assert learned_growth(pair.target, pair.draft, "here") is None
    assert kept(pair) > 0
    for _ in range(LEAST_TREES // LEAST_TIMED):
        growth = took(2, 2, 50.0, num_trees=LEAST_TIMED - 1)
        growth.observe(2, 2, 0.5)
        keep_learned(pair.target, pair.draft, [of_trees(LEAST_TIMED, 0.5)], growth, place="here")
    assert learned_growth(pair.target, pair.draft, "here").seconds == pytest.approx(0.5, rel=0.05)


def test_seconds_beside_other_programs_are_those_of_a_quiet_processor_and_back(pair: ModelPair) -> None:
    """A draft whose trees were timed beside others would give way for good once they are quiet."""
    assert pair.draft is not None
    keep_learned(pair.target, pair.draft, [of_trees(20, 0.5)], took(2, 2, 0.5), place="here", share=0.2)
    for share, seconds in ((1.0, 0.1), (0.25, 0.4)):
        found = learned_growth(pair.target, pair.draft, "here", share=share)
        assert found.seconds == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 1, "rate": 0.5, "num_trees": 9}',
        '{"format": 1, "rate": {"rate": 0.5, "num_trees": 9}}',
        '{"format": 2, "rate": {"rate": 2, "num_trees": 9}}',
        '{"format": 2, "rate": {"rate": 0.5}}',
    ],
)
def test_a_file_that_says_nothing_is_none(pair: ModelPair, content: str) -> None:
    keep(pair, of_trees(100, 1.0))
    (path,) = (cache_folder() / "drafts").iterdir()
    path.write_text(content, encoding="utf-8")
    assert pair.draft is not None
    assert learned_rate(pair.target, pair.draft) is None


def took(nodes: int, layers: int, seconds: float, *, num_trees: int = 20) -> GrowthCosts:
    growth = GrowthCosts()
    for _ in range(num_trees):
        growth.observe(layers, nodes, seconds)
    return growth


def test_what_a_mean_tree_took_is_kept_for_its_place_alone(pair: ModelPair) -> None:
    assert pair.draft is not None
    keep_learned(pair.target, pair.draft, [of_trees(100, 1.0)], took(2, 2, 0.5), place="here")
    found = learned_growth(pair.target, pair.draft, "here")
    assert (found.nodes, found.layers, found.num_trees) == (2, 2, 20)
    assert found.seconds == pytest.approx(0.5, rel=0.05)
    keep_learned(pair.target, pair.draft, [of_trees(300, 1.0)], took(2, 2, 0.1, num_trees=60), place="here")
    assert learned_growth(pair.target, pair.draft, "here").seconds == pytest.approx(0.2, rel=0.05)
    assert learned_growth(pair.target, pair.draft, "elsewhere") is None
    rate = kept(pair)
    keep_learned(pair.target, pair.draft, [of_trees(8, 1.0)], took(2, 2, 3.0), place="elsewhere")
    assert learned_growth(pair.target, pair.draft, "here") is None
    assert kept(pair) == pytest.approx(rate), "how far guesses went does not depend on the place"


@pytest.mark.parametrize(("num_trees", "num_timed"), [(LEAST_TREES - 1, 20), (20, LEAST_TREES - 1)])
def test_what_a_few_trees_took_says_nothing(num_trees: int, num_timed: int, pair: ModelPair) -> None:
    """A first tree loads kernels, which takes a hundred times as long as it, and not all trees are timed."""
    assert pair.draft is not None
    few, enough = took(2, 2, 3.0, num_trees=num_timed), took(2, 2, 3.0, num_trees=LEAST_TREES)
    keep_learned(pair.target, pair.draft, [of_trees(num_trees, 1.0)], few, place="here")
    assert learned_growth(pair.target, pair.draft, "here") is None
    keep_learned(pair.target, pair.draft, [of_trees(LEAST_TREES, 1.0)], enough, place="here")
    assert learned_growth(pair.target, pair.draft, "here") is not None


def test_what_is_known_of_a_draft_that_gives_way_ages(pair: ModelPair) -> None:
    """What too few trees say is left to add up."""
    assert pair.draft is not None
    keep_learned(pair.target, pair.draft, [of_trees(5000, 1.0)], took(2, 2, 0.5, num_trees=64), place="here")
    found = []
    while learned_rate(pair.target, pair.draft) is not None:
        let_age(pair.target, pair.draft)
        found.append(learned_growth(pair.target, pair.draft, "here"))
    assert [None if one is None else one.num_trees for one in found] == [32, 16, 8, None, None, None, None]
    keep_learned(pair.target, pair.draft, [of_trees(LEAST_TREES / 2, 1.0)])
    let_age(pair.target, pair.draft)
    keep_learned(pair.target, pair.draft, [of_trees(LEAST_TREES / 2, 1.0)])
    assert learned_rate(pair.target, pair.draft) is not None


def test_an_engine_keeps_what_its_trees_took(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own threads share cores while it runs, which is no other program's part."""
    monkeypatch.setattr(engine_module, "core_share", lambda _device: 0.5)
    with Engine.from_pair(pair, dtype="float32", context_tokens=64) as engine:
        monkeypatch.setattr(engine_module, "core_share", lambda _device: 0.1)
        growth, place = engine.trees.tuner.costs.growth, growth_place(engine.run_config)
        for _ in range(LEAST_TREES):
            growth.observe(2, 2, 0.25)
        engine.trees.worths[engine.tree] = of_trees(100, 1.0)
    assert pair.draft is not None
    found = learned_growth(pair.target, pair.draft, place)
    assert found.seconds == pytest.approx(growth.seconds(found.layers, found.nodes) / 2)
    others = [replace(engine.run_config, threads=17), replace(engine.run_config, dtype=torch.bfloat16)]
    assert all(learned_growth(pair.target, pair.draft, growth_place(other)) is None for other in others)


def test_an_engine_keeps_what_its_trees_have_shown(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tree counts what the draft itself had proposed, of nodes that were verified."""
    monkeypatch.setattr(DraftWorth, "pays", lambda *_, **__: True)
    with Engine.from_pair(pair, tree=TreeSettings(size=4, depth=2), dtype="float32") as engine:
        engine.generate(list(range(20, 60)), max_new_tokens=60, seed=1, temperature=1.0, ignore_eos=True)
        (worth,) = engine.trees.worths.values()
        assert LEAST_TREES <= worth.seen.num_trees < 60
    assert pair.draft is not None
    found = learned_rate(pair.target, pair.draft)
    assert found.num_trees == worth.seen.num_trees
    seen = worth.seen
    each = 1 + seen.tokens / seen.num_trees
    assert found.rate == pytest.approx(
        rate_of(each, nodes=seen.nodes / seen.num_trees, layers=seen.layers / seen.num_trees)
    )
