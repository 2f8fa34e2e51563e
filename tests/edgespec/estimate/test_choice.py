"""Of several drafts the one is taken that pays most on this machine, and the text is the same with each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec import engine as engine_module
from edgespec.cli import run
from edgespec.errors import EdgespecError
from edgespec.estimate import choice
from edgespec.estimate.choice import DraftTrees, reckon_drafts, with_best_draft
from edgespec.estimate.speed import load_there, place_on, rates_of
from edgespec.hub.names import AUTO, BUILT_IN_HEAD_FOLDER, NO_DRAFT
from edgespec.pair.folder import open_model
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from edgespec.placement import acceptance
from edgespec.placement.kept_speed import growth_place
from edgespec.placement.pair_profile import pair_facts
from edgespec.placement.pair_setup import set_up, set_up_by_profile
from edgespec.placement.parallel import Workload
from edgespec.placement.place import read_memory
from edgespec.placement.step_seconds import PairLoad, step_seconds
from edgespec.tree.settings import TreeOptions
from edgespec.tuning.costs import GrowthCosts
from edgespec.tuning.draft_memory import MeanGrowth, keep_learned
from edgespec.tuning.draft_worth import DraftWorth, SeenTrees
from edgespec.user_paths import profiles_folder
from profiles.files import write_profile
from profiles.hardware import read_assumptions, read_hardware
from profiles.measure import machine_facts
from profiles.schema import GrowthSeconds, Profile, SizeTokens
from tests.profiles.examples import example_plan, example_profile

SELF = Path("self")
SLOW = 1e7  # operations a second
STREAMED = MemoryLimits(max_resident_layers=0)
OPTIONS: dict[str, Any] = {"dtype": "float32", "context_tokens": 64}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that was measured to be as a data sheet has it, before a slow disk."""
    hardware = (
        replace(read_hardware("cpu"), sources={"all": "measured"}),
        replace(read_assumptions(), host_disk_bytes_per_s=1e6),
    )
    monkeypatch.setattr(choice, "hardware_here", lambda *_: hardware)
    monkeypatch.setattr(choice, "core_share", lambda _device: 1.0)


def learn(
    pair: ModelPair, name: str, *, tokens_of_100: int, seconds: float | None = None, place: str | None = None
) -> None:
    """Let 100 chains of two nodes be known, in which so many tokens of the draft's were right, and what each took."""
    draft = next(one.model for one in pair.at_hand if one.name == name)
    worth, growth = DraftWorth(), GrowthCosts()
    worth.seen = SeenTrees(num_trees=100, tokens=tokens_of_100, nodes=200, layers=200)
    assert draft is not None
    for _ in range(0 if seconds is None else 100):
        growth.observe(2, 2, seconds or 0.0)
    run_config = choice.resolve_run_config(pair.target, None, draft=draft, limits=STREAMED, **OPTIONS)
    keep_learned(pair.target, draft, [worth], growth, place=place or growth_place(run_config))


def chosen(pair: ModelPair, limits: MemoryLimits = STREAMED, trees: DraftTrees | None = None, **options: Any) -> str:
    trees = trees or DraftTrees.held_to(None)
    found = with_best_draft(pair, trees, temperature=0.0, limits=limits, **OPTIONS, **options)
    assert not found.is_undecided
    return "none" if found.draft is None else found.draft.named.name


@pytest.fixture
def pair(pair_folders: tuple[Path, Path]) -> ModelPair:
    return open_pair(pair_folders[0], [NO_DRAFT, pair_folders[1], SELF])


def test_the_fastest_by_the_sums_of_estimates_drafts(pair: ModelPair) -> None:
    found = with_best_draft(pair, DraftTrees.held_to(None), temperature=0.0, limits=STREAMED, **OPTIONS)
    said = [part.split()[0] for part in found.choice.removeprefix("draft: ").split("; ")]
    speeds = [float(part.split()[-2]) for part in found.choice.removeprefix("draft: ").split("; ")]
    assert speeds == sorted(speeds, reverse=True)
    assert (said[0], said[-1]) == (found.draft.named.name, "none")
    assert found.choice in found.notes


@pytest.mark.parametrize(("name", "other"), [("draft", "self"), ("self", "draft")])
def test_what_earlier_runs_have_learned_of_a_draft_counts_for_it_alone(pair: ModelPair, name: str, other: str) -> None:
    """Of one nearly nothing was right, of the other nearly all; under each other's name the other one would draft."""
    learn(pair, name, tokens_of_100=190)
    learn(pair, other, tokens_of_100=2)
    assert chosen(pair) == name


def test_what_trees_took_in_earlier_runs_counts_where_the_machine_is_measured_to_be_faster(pair: ModelPair) -> None:
    """On this machine, and not in another place."""
    for name in ("draft", "self"):
        learn(pair, name, tokens_of_100=150)
    first = chosen(pair)
    learn(pair, first, tokens_of_100=150, seconds=100.0, place="another machine")
    assert chosen(pair) == first
    learn(pair, first, tokens_of_100=150, seconds=100.0)
    assert chosen(pair) not in {first, "none"}
    before, after = reckoned_of(pair, STREAMED), reckoned_of(pair, STREAMED, is_here=True)
    for one, other in zip(before, after, strict=True):  # what is measured here says nothing of a card elsewhere
        assert (one.tokens_per_s > 10 * other.tokens_per_s) == (one.draft.name == first)


def test_a_draft_that_has_given_way_is_tried_again(pair: ModelPair) -> None:
    """No run times it, so that one that was timed beside other programs would stay away for good.

    What only asks which draft would be taken, as a dry run, changes nothing.
    """
    for name in ("draft", "self"):
        learn(pair, name, tokens_of_100=150)
    first = chosen(pair)
    learn(pair, first, tokens_of_100=150, seconds=100.0)
    assert first not in {chosen(pair) for _ in range(8)}
    found = []
    for _ in range(8):
        with Engine.from_pair(pair, limits=STREAMED, self_check=False, draft_check=False, **OPTIONS) as engine:
            found.append(engine.pair.draft is not None and engine.pair.draft.named.name == first)
    assert 2 <= found.index(True) <= 7


def test_what_was_timed_beside_others_is_forgotten_with_the_cache(pair: ModelPair) -> None:
    for name in ("draft", "self"):
        learn(pair, name, tokens_of_100=150)
    first = chosen(pair)
    learn(pair, first, tokens_of_100=150, seconds=100.0)
    assert chosen(pair) != first
    assert run(["cache", "clear", "drafts", "--yes"]) == 0
    for name in ("draft", "self"):
        learn(pair, name, tokens_of_100=150)
    assert chosen(pair) == first


def profiled(pair: ModelPair, name: str, *, tokens: float, layer_s: float) -> Profile:
    """Keep a profile of a draft's as if measured here: chains of two nodes, of greedy texts and of others."""
    draft = next(one.model for one in pair.at_hand if one.name == name)
    run_config = choice.resolve_run_config(pair.target, None, draft=draft, limits=STREAMED, **OPTIONS)
    placement = set_up(replace(pair, draft=draft, at_hand=()), run_config, TreeSettings()).placement
    by_size = tuple(
        SizeTokens(size=size, tokens=found, nodes=size, layers=size, weight=50.0)
        for size, found in ((2, tokens), (16, 16.0))  # what other trees brought is not the plan's
    )
    plans = [replace(example_plan(), size=2, tokens=tokens, nodes=2.0, by_size=by_size)] * 2
    profile = example_profile(
        *plans, machine=machine_facts(), pair=pair_facts(pair.target, draft, run_config, placement),
        growth=GrowthSeconds(tree_s=0.0, layer_s=layer_s, node_s=0.0),
    )  # fmt: skip
    write_profile(profile, profiles_folder() / f"{profile.name}.toml")
    return profile


FAR, NEAR, FAST, SLOW_S = 2.9, 1.05, 1e-4, 100.0


@pytest.mark.parametrize(("tokens", "layer_s"), [(NEAR, FAST), (FAR, SLOW_S)], ids=["far from right", "slow"])
def test_a_profile_of_a_draft_counts_above_what_is_assumed_or_learned_of_it(
    tokens: float, layer_s: float, pair: ModelPair
) -> None:
    """As far as the run follows it."""
    learn(pair, "draft", tokens_of_100=195)
    learn(pair, "self", tokens_of_100=150)
    assert chosen(pair) == "draft"
    profile = profiled(pair, "draft", tokens=tokens, layer_s=layer_s)
    for source, found in [
        ("none", "draft"), ("auto", "self"), (str(profiles_folder() / f"{profile.name}.toml"), "self"),
    ]:  # fmt: skip
        assert chosen(pair, trees=DraftTrees.held_to(None, profile=source)) == found
        assert chosen(pair, trees=DraftTrees.given(TreeOptions(profile=source))) == found
    profiled(pair, "draft", tokens=FAR, layer_s=FAST)
    assert chosen(pair, trees=DraftTrees.held_to(None, profile="auto")) == "draft"


@pytest.mark.parametrize("source", ["auto", "none"])
def test_an_engine_compares_drafts_by_the_profiles_that_it_would_follow(
    source: str, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def best(pair: ModelPair, trees: DraftTrees, **_: Any) -> ModelPair:
        asked.append(trees.options.profile)
        return pair.decided(pair.at_hand[0], "")

    monkeypatch.setattr(engine_module, "with_best_draft", best)
    Engine.from_pretrained(pair_folders[0], draft=[NO_DRAFT, SELF], profile=source, context_tokens=64).close()
    assert asked == [source]


@pytest.mark.parametrize("case", ["slow", "likely", "fast"])
def test_a_tree_that_was_measured_takes_its_seconds_and_others_as_many_times_as_long(
    case: str, pair: ModelPair
) -> None:
    (one,) = (one for one in reckoned_of(pair, STREAMED) if one.draft.name == "draft")
    seen = MeanGrowth(nodes=8, layers=2, seconds=5.0, num_trees=1, place="")
    rates = rates_of(one.pair, getattr(one.pair.assumptions, case))
    placed = place_on(one.pair, one.tree)
    loads = [load_there(each, placed) for each in (one.pair, replace(one.pair, growth=seen))]

    def draft_s(load: PairLoad, num_texts: int, nodes: int, depth: int) -> float:
        return step_seconds(load, rates, num_texts, nodes=nodes, depth=depth, tokens=1.0).draft_s

    assert draft_s(loads[1], 1, 8, 2) == pytest.approx(5.0)
    for shape in [(1, 8, 2), (1, 64, 8), (4, 8, 2)]:
        expected = draft_s(loads[0], *shape) * 5.0 / draft_s(loads[0], 1, 8, 2)
        assert draft_s(loads[1], *shape) == pytest.approx(expected)
    assert draft_s(loads[1], 1, 0, 0) == 0


def test_what_is_learned_with_another_target_says_nothing(pair: ModelPair, tmp_path: Path) -> None:
    before = chosen(pair)
    learn(replace(pair, target=replace(pair.target, stated={"another": 1})), before, tokens_of_100=2)
    assert chosen(pair) == before
    learn(pair, before, tokens_of_100=2)
    assert chosen(pair) != before


def test_drafts_that_bring_nothing_are_left_out(pair: ModelPair) -> None:
    for name in ("draft", "self"):
        learn(pair, name, tokens_of_100=0)
    assert chosen(pair, MemoryLimits()) == "none"


def test_one_that_does_not_fit_is_not_taken(pair: ModelPair) -> None:
    learn(pair, "draft", tokens_of_100=190)
    needed = {
        name: reckoned.pair
        for name, reckoned in ((one.draft.name, one) for one in reckoned_of(pair, STREAMED))
        if reckoned.estimate is not None
    }
    assert set(needed) == {"none", "draft", "self"}
    alone = choice.estimate_plain(needed["none"]).weights.placement.planned_bytes
    tight = MemoryLimits(max_cpu_bytes=alone, max_resident_layers=0)
    assert chosen(pair, tight) == "none"
    with pytest.raises(EdgespecError, match="none of the drafts can be used") as caught:
        chosen(replace(pair, at_hand=pair.at_hand[1:]), tight)
    assert "draft: " in caught.value.what


def reckoned_of(pair: ModelPair, limits: MemoryLimits, *, is_here: bool = False) -> list[choice.ReckonedDraft]:
    run_config = choice.resolve_run_config(pair.target, None, limits=limits, **OPTIONS)
    hardware, assumptions = choice.hardware_here(run_config.device, [])
    alone = choice.PairOnHardware(
        weights=choice.PairWeights(
            target=choice.weights_by_size(pair.target, dtype=torch.float32, quant=None), draft=None
        ),
        hardware=hardware, assumptions=assumptions, run_config=run_config,
        memory=read_memory(limits, run_config.device), is_here=is_here,
    )  # fmt: skip
    return reckon_drafts(alone, pair.at_hand, DraftTrees.held_to(None), temperature=None, limits=limits, **OPTIONS)


@pytest.mark.parametrize("is_far", [False, True])
def test_of_a_draft_far_smaller_than_published_ones_less_is_expected(
    is_far: bool, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate of such a pair alone has the published rate, and says so."""
    target, draft = (choice.weights_by_size(open_model(path), dtype=torch.float32, quant=None) for path in pair_folders)
    monkeypatch.setattr(acceptance, "MUCH_SMALLER", target.num_parameters / draft.num_parameters / 10 - (is_far - 0.5))
    weights, tree = choice.PairWeights(target=target, draft=draft), TreeSettings()
    published, found = (
        acceptance.acceptance_of_draft(weights, tree, None, expects_less=less) for less in (False, True)
    )
    assert "as published" in published.about
    assert ("built-in pair" in found.about) == (found.rates[0] < published.rates[0]) == is_far


def test_a_copy_of_layers_that_stay_is_none(pair: ModelPair) -> None:
    (why,) = [one.about for one in reckoned_of(pair, MemoryLimits()) if one.estimate is None]
    assert "a copy would replace none" in why


@pytest.mark.parametrize("num_texts", [None, 3])
def test_drafts_are_compared_for_as_many_texts_as_a_run_of_the_rows_has_under_way(
    num_texts: int | None, pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a draft as without one: both share each pass."""
    workload, found = Workload(num_waiting=9, mean_tokens=40, num_texts=num_texts), []
    monkeypatch.setattr(choice, "best_of", lambda reckoned: found.extend(reckoned) or reckoned[1])
    decided = with_best_draft(
        pair, DraftTrees.held_to(None), temperature=0.0, workload=workload, limits=STREAMED, **OPTIONS
    )
    run_config = choice.resolve_run_config(pair.target, None, draft=decided.draft, limits=STREAMED, **OPTIONS)
    setup = set_up_by_profile(decided, run_config, TreeOptions(), temperature=0.0, workload=workload)
    assert setup.run_config.num_texts > 1
    for one in found:
        assert one.estimate.likely.num_texts == setup.run_config.num_texts
        assert one.pair.run_config.all_tokens == setup.run_config.all_tokens


def test_a_draft_that_pays_for_one_text_may_not_pay_for_many(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows cost, what many texts verify is all that a pass does."""
    hardware, assumptions = choice.hardware_here(torch.device("cpu"), [])
    slow = replace(hardware, float32_flops_per_s=SLOW), assumptions
    monkeypatch.setattr(choice, "hardware_here", lambda *_: slow)
    assert chosen(pair) == "draft"
    assert chosen(pair, parallel=8) == "none"


def test_a_draft_that_pays_on_a_quiet_processor_may_not_pay_beside_other_programs(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls take longer there, and the weights that the target's passes wait for do not."""
    hardware, assumptions = choice.hardware_here(torch.device("cpu"), [])
    slow = replace(hardware, float32_flops_per_s=SLOW), assumptions
    monkeypatch.setattr(choice, "hardware_here", lambda *_: slow)
    assert chosen(pair) == "draft"
    monkeypatch.setattr(choice, "core_share", lambda _device: 0.02)
    assert chosen(pair) == "none"
    found = with_best_draft(pair, DraftTrees.held_to(None), temperature=0.0, limits=STREAMED, **OPTIONS)
    assert found.choice is not None
    assert "leave 2 % of a core" in found.choice


def test_seconds_of_earlier_runs_take_as_much_longer_beside_other_programs(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("draft", "self"):
        learn(pair, name, tokens_of_100=150)
    first = chosen(pair)
    learn(pair, first, tokens_of_100=150, seconds=1e-4)
    assert chosen(pair) == first
    monkeypatch.setattr(choice, "core_share", lambda _device: 1e-6)
    assert chosen(pair) != first


def test_without_trees_none_drafts(pair: ModelPair) -> None:
    assert chosen(pair, trees=DraftTrees.given(TreeOptions(explicit={"policy": "none"}))) == "none"


def test_a_pair_of_one_draft_is_left_as_it_is(pair_folders: tuple[Path, Path]) -> None:
    named = open_pair(*pair_folders)
    assert with_best_draft(named, DraftTrees.held_to(None), temperature=0.0) is named


def test_at_hand_are_the_targets_own_and_what_is_built_in() -> None:
    pair = open_pair(None, [AUTO])
    assert [one.name for one in pair.at_hand] == ["none", "draft", "head", "self"]
    assert {BUILT_IN_HEAD_FOLDER, DEMO_FOLDER / "draft"} <= {one.model.folder for one in pair.at_hand if one.model}
    assert pair.draft is None
    assert [one.name for one in open_pair(None, [NO_DRAFT, AUTO, NO_DRAFT]).at_hand] == [
        "none",
        "draft",
        "head",
        "self",
    ]


@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.0), ("bfloat16", 0.8)])
def test_the_text_is_the_same_whichever_drafts(
    pair_folders: tuple[Path, Path], dtype: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a run's trees brought is kept for the next one's choice."""
    texts, drafts = set(), []
    asked: dict[str, Any] = {"max_new_tokens": 48, "seed": 5, "temperature": temperature, "ignore_eos": True}
    for wanted in ("none", "draft", "self"):
        prefer(monkeypatch, wanted)
        with Engine.from_pretrained(
            pair_folders[0], draft=[NO_DRAFT, pair_folders[1], SELF], dtype=dtype, limits=STREAMED, context_tokens=128
        ) as engine:
            engine.use_tree(None if wanted == "none" else TreeSettings(size=6, depth=3))
            texts.add(engine.generate(list(range(20, 40)), **asked).token_ids)
            drafts.append("none" if engine.pair.draft is None else engine.pair.draft.named.name)
            assert engine.pair.choice == f"draft: {wanted}"
    assert drafts == ["none", "draft", "self"]
    assert len(texts) == 1


def prefer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def best(found: list[choice.ReckonedDraft]) -> choice.ReckonedDraft:
        return next(one for one in found if one.draft.name == name)

    told: Callable[..., str] = lambda _found, best: f"draft: {best.draft.name}"  # noqa: E731
    monkeypatch.setattr(choice, "best_of", best)
    monkeypatch.setattr(choice, "in_words", told)
