"""From a profile to settings: which plan is followed, and what is said where none is."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import EdgespecError, Engine, MemoryLimits, TreeSettings
from edgespec.grow.acceptance import default_acceptance
from edgespec.grow.sequoia import sequoia_table
from edgespec.pair.folder import fingerprint, open_model
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.pair_profile import pair_facts
from edgespec.placement.pair_setup import PairSetup, set_up, set_up_by_profile
from edgespec.placement.parallel import PassShares, Workload, pass_shares, with_workload
from edgespec.placement.place import Memory
from edgespec.placement.profile_trees import acceptance_of, tree_settings
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeOptions
from edgespec.tuning.memory import plan_at
from edgespec.user_paths import profiles_folder
from offload.placement import ExpertPlacement
from profiles.files import write_profile
from profiles.measure import machine_facts
from profiles.schema import GrowthSeconds, Plan, Profile
from tests.offload.experts.mixtures import save_mixture
from tests.offload.gguf.test_tiny_models import TINY
from tests.profiles.examples import PLAIN, example_plan, example_profile

ADAPTIVE = example_plan(threshold=0.02, stop_gain=0.25)
RUN = RunConfig(
    device=torch.device("cpu"), dtype=torch.float32, limits=MemoryLimits(), context_tokens=64, prompt_tokens=16
)


def test_a_plan_becomes_settings() -> None:
    assert tree_settings(ADAPTIVE) == TreeSettings(size=16, threshold=0.02, stop_gain=0.25)
    assert tree_settings(PLAIN) == TreeSettings(policy="none")


@pytest.mark.parametrize(
    ("plan", "given", "settings"),
    [
        (ADAPTIVE, {"size": 40}, replace(tree_settings(ADAPTIVE), size=40)),
        (ADAPTIVE, {"threshold": 0.0, "max_children": 3},
         replace(tree_settings(ADAPTIVE), threshold=0.0, max_children=3)),
        (ADAPTIVE, {"policy": "adaptive", "depth": 2}, replace(tree_settings(ADAPTIVE), depth=2)),
        (PLAIN, {"draft_temperature": 0.5}, TreeSettings(policy="none", draft_temperature=0.5)),
        *((plan, given, TreeSettings(**given)) for plan, given in (
            (ADAPTIVE, {"policy": "dyspec"}), (ADAPTIVE, {"policy": "dyspec", "size": 40}),
            (PLAIN, {"policy": "adaptive"}), (ADAPTIVE, {"policy": "chain", "draft_tokens": 3}),
            (PLAIN, {"size": 40}), (ADAPTIVE, {"branching": (2, 2), "policy": "mcsd"}),
        )),
    ],
)  # fmt: skip
def test_a_flag_overrides_its_value_alone_and_another_policy_or_a_flag_of_one_drops_the_plan(
    plan: Plan, given: dict[str, Any], settings: TreeSettings
) -> None:
    assert tree_settings(plan, TreeOptions(explicit=given)) == settings


@pytest.mark.parametrize(
    ("wanted", "planned"), [(0.0, 0.0), (0.01, 0.6), (0.5, 0.6), (0.79, 0.6), (0.81, 1.0), (1.7, 1.0)]
)
def test_the_nearest_temperature_counts_and_greedy_has_a_plan_of_its_own(wanted: float, planned: float) -> None:
    assert plan_at(example_profile(temperatures=(1.0, 0.0, 0.6)), wanted).temperature == planned


def test_without_a_greedy_plan_the_nearest_serves_greedy_decoding_too() -> None:
    assert plan_at(example_profile(temperatures=(1.0, 0.6)), 0.0).temperature == 0.6
    assert plan_at(example_profile(temperatures=(0.0,)), 0.9).temperature == 0.0


def test_the_profiles_acceptance_is_the_pairs_own() -> None:
    model = default_acceptance()
    profile = example_profile(acceptance=model.to_document())
    assert acceptance_of(profile).to_document() == model.to_document()
    assert acceptance_of(replace(profile, acceptance=None)) is None, "none was fitted"
    with pytest.raises(EdgespecError, match="some-gpu"):
        acceptance_of(example_profile(acceptance={"schema": "edgespec.acceptance/1", "slot": []}))


# A pair, a profile of it, and what is settled for a run.


@pytest.fixture
def pair(pair_folders: tuple[Path, Path]) -> ModelPair:
    return open_pair(*pair_folders)


@pytest.fixture
def profile(pair: ModelPair) -> Profile:
    """As if measured here, of this pair."""
    facts = pair_facts(pair.target, pair.draft, RUN, set_up(pair, RUN, TreeSettings()).placement)
    return example_profile(machine=machine_facts(), pair=facts, acceptance=default_acceptance().to_document())


SetUp = Callable[..., PairSetup]


@pytest.fixture
def set_up_here(pair: ModelPair) -> SetUp:
    def call(source: str = "auto", *, temperature: float = 0.8, **given: Any) -> PairSetup:
        return set_up_by_profile(pair, RUN, TreeOptions(explicit=given, profile=source), temperature=temperature)

    return call


def keep(profile: Profile) -> None:
    write_profile(profile, profiles_folder() / f"{profile.name}.toml")


def is_default(setup: PairSetup) -> bool:
    return (setup.tree, setup.profile, setup.plan) == (TreeSettings(), None, None)


def test_without_a_profile_there_are_the_defaults_and_nothing_to_say(set_up_here: SetUp) -> None:
    found = set_up_here()
    assert is_default(found)
    assert found.notes == ()
    assert set_up_here(size=9).tree == TreeSettings(size=9)


def test_the_profile_of_this_pair_is_followed_at_each_temperature(set_up_here: SetUp, profile: Profile) -> None:
    keep(profile)
    for temperature, plan in zip((0.0, 0.8), profile.plans, strict=True):
        found = set_up_here(temperature=temperature)
        assert (found.tree, found.profile, found.plan, found.notes) == (tree_settings(plan.best), profile, plan, ())
        assert found.predicted_per_s == pytest.approx(4.0)


def test_a_prediction_is_of_the_plan_alone(set_up_here: SetUp, profile: Profile) -> None:
    keep(profile)
    found = set_up_here(size=40)
    assert (found.tree.size, found.tree.threshold, found.profile) == (40, 0.02, profile)
    assert found.predicted_per_s is None
    assert set_up_here(size=16).predicted_per_s is not None


@pytest.mark.parametrize("words", [(None, "none"), ("none", None)])
def test_a_profile_of_published_weights_in_a_kernels_form_is_not_of_those_without_one(
    words: tuple[str | None, str | None],
) -> None:
    pair = open_pair(TINY / "llama-q8_0.gguf", TINY / "llama-q8_0.gguf")
    measured, run = (replace(RUN, quant=word, draft_quant=word) for word in words)
    facts = pair_facts(pair.target, pair.draft, measured, set_up(pair, measured, TreeSettings()).placement)
    keep(example_profile(machine=machine_facts(), pair=facts, acceptance=default_acceptance().to_document()))
    assert set_up_by_profile(pair, measured, TreeOptions(profile="auto"), temperature=0.0).profile is not None
    found = set_up_by_profile(pair, run, TreeOptions(profile="auto"), temperature=0.0)
    assert found.profile is None
    assert f"quant was {words[0] or 'published'}, is {words[1] or 'published'}" in found.notes[0]


def test_plain_weights_have_one_profile_whether_none_is_said_or_nothing(pair: ModelPair, profile: Profile) -> None:
    keep(profile)
    run = replace(RUN, quant="none", draft_quant="none")
    assert set_up_by_profile(pair, run, TreeOptions(profile="auto"), temperature=0.0).profile is not None


def test_none_asks_for_no_profile(set_up_here: SetUp, profile: Profile) -> None:
    keep(profile)
    assert is_default(set_up_here("none"))
    assert set_up_here(policy="none").profile is None


def test_a_stale_profile_is_not_used_and_the_note_says_which_fact_changed(set_up_here: SetUp, profile: Profile) -> None:
    keep(replace(profile, machine=replace(profile.machine, num_cores=999)))
    found = set_up_here()
    assert is_default(found)
    (note,) = found.notes
    assert f"cores was 999, is {profile.machine.num_cores}" in note
    assert "edgespec profile" in note


def test_opt_trees_delta_is_twice_the_share_that_a_layer_takes_of_a_pass(set_up_here: SetUp, profile: Profile) -> None:
    """A layer takes a call of 14 ms and a node of 1 ms; a pass over 41 rows takes 241 ms."""
    keep(replace(profile, growth=GrowthSeconds(tree_s=1.0, layer_s=0.014, node_s=0.001)))
    for temperature in (0.0, 0.8):
        found = set_up_here(policy="opt-tree", size=40, temperature=temperature)
        assert found.tree.stop_gain == pytest.approx(2 * 0.015 / 0.241, rel=1e-3)
        assert replace(found.tree, stop_gain=0.0) == TreeSettings(policy="opt-tree", size=40)
        (note,) = found.notes
        assert "adds less than 0.12 tokens: one takes 0.062 of a pass" in note
    keep(replace(profile, growth=GrowthSeconds(tree_s=1.0, layer_s=1.0, node_s=0.0)))
    assert set_up_here(policy="opt-tree", size=40).tree.stop_gain == 0.8, "dearer drafts were not tried"


def test_opt_trees_delta_is_the_users_or_none_without_a_profile(set_up_here: SetUp, profile: Profile) -> None:
    keep(profile)
    for stop_gain in (0.0, 0.3):
        found = set_up_here(policy="opt-tree", size=40, stop_gain=stop_gain)
        assert (found.tree.stop_gain, found.notes) == (stop_gain, ())
    assert set_up_here(policy="eagle2", size=40).tree.stop_gain == 0
    assert set_up_here("none", policy="opt-tree", size=40).tree.stop_gain == 0


def test_sequoias_size_and_depth_are_those_of_most_tokens_a_second(set_up_here: SetUp, profile: Profile) -> None:
    """The same pair, with cheap passes and a dear draft, then the other way round: small and flat, large and deep."""
    (alone, *_) = profile.passes

    def found(*, layer_s: float, row_s: float, **given: Any) -> PairSetup:
        points = tuple(replace(point, seconds=0.2 + row_s * point.rows) for point in alone.points)
        growth = GrowthSeconds(tree_s=0.0, layer_s=layer_s, node_s=0.0)
        keep(replace(profile, passes=(replace(alone, points=points),), growth=growth))
        return set_up_here(temperature=0.0, policy="sequoia", draw="chosen", **given)

    flat = found(layer_s=0.1, row_s=0.0)
    small = found(layer_s=1e-6, row_s=0.05)
    large = found(layer_s=1e-6, row_s=0.0)
    assert large.tree.size == large.largest_tree.num_nodes
    assert flat.tree.depth < 4 < large.tree.depth
    assert small.tree.size < 16
    rates = default_acceptance().rank_acceptance(0.0, "chosen")

    def speed(size: int, depth: int) -> float:
        tokens = sequoia_table(rates, size=size, depth=depth, max_children=16).expected_tokens(size, depth)
        return tokens / (0.2 + depth * 0.1)

    best = speed(flat.tree.size, flat.tree.depth)
    assert best == pytest.approx(max(speed(size, depth) for size in (8, 64, 255, 256) for depth in range(1, 12)))
    (note,) = flat.notes
    assert f"sequoia trees of {flat.tree.size} nodes, depth {flat.tree.depth}: {best:.3g} tokens/s" in note
    assert flat.is_tuned
    assert flat.largest_tree.depth == flat.tree.depth, "trees that tune themselves are as deep"
    assert found(layer_s=0.1, row_s=0.0, size=40).tree == TreeSettings(policy="sequoia", draw="chosen", size=40)


def test_a_profiles_file_is_used_from_anywhere(set_up_here: SetUp, profile: Profile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "given.toml")
    found = set_up_here(str(tmp_path / "given.toml"))
    assert (found.tree, found.profile) == (tree_settings(profile.plans[1].best), profile)
    assert (found.plan, found.notes) == (profile.plans[1], ())


def test_a_profile_of_another_machine_is_used_where_it_is_named_with_a_note(
    set_up_here: SetUp, profile: Profile, tmp_path: Path
) -> None:
    elsewhere = replace(profile, machine=replace(profile.machine, num_cores=999))
    write_profile(elsewhere, tmp_path / "given.toml")
    found = set_up_here(str(tmp_path / "given.toml"))
    assert (found.profile, found.tree) == (elsewhere, tree_settings(profile.plans[1].best))
    (note,) = found.notes
    assert "measured elsewhere" in note
    assert "cores was 999" in note


@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_profile_of_another_pair_is_refused(model: str, set_up_here: SetUp, profile: Profile, tmp_path: Path) -> None:
    other = replace(profile.pair, **{f"{model}_fingerprint": "0000", model: "other"})
    write_profile(replace(profile, pair=other), tmp_path / "given.toml")
    with pytest.raises(EdgespecError, match=rf"measured with {model} 'other' \(0000\)") as caught:
        set_up_here(str(tmp_path / "given.toml"))
    assert caught.value.code == "E_PROFILE"


def test_a_file_that_is_missing_or_damaged_is_named(set_up_here: SetUp, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("name = ")
    for name, code in (("none.toml", "E_PROFILE_NOT_FOUND"), ("bad.toml", "E_PROFILE")):
        with pytest.raises(EdgespecError, match=name) as caught:
            set_up_here(str(tmp_path / name))
        assert caught.value.code == code


def test_where_plain_decoding_is_fastest_there_is_no_tree_and_the_note_has_both_numbers(
    set_up_here: SetUp, profile: Profile
) -> None:
    why = "trees of 16 nodes would give 1 tokens/s, plain 4; it is switched off"
    keep(replace(profile, plans=(replace(profile.plans[1], best=PLAIN),)))
    assert set_up_here().tree == TreeSettings(policy="none")
    (note,) = set_up_here().notes
    assert note.endswith(why)
    assert set_up_here().predicted_per_s == pytest.approx(4.0)
    wanted = set_up_here(size=9)
    assert (wanted.tree, wanted.notes) == (TreeSettings(size=9), ())


def memory_of(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, *, layers: float, tree: TreeSettings, run_config: RunConfig = RUN
) -> list[int]:
    """Leave room for so many of the target's layers beside these trees; what is read of the memory is noted."""
    run_config = replace(run_config, limits=MemoryLimits(max_resident_layers=0))
    placed = set_up(pair, run_config, tree)
    resident_bytes = int(layers * max(record.cpu_bytes for record in placed.weights.target.skeleton.records))
    free_bytes = placed.placement.planned_bytes + resident_bytes
    read: list[int] = []

    def read_memory(*_: Any) -> Memory:
        read.append(free_bytes)
        return Memory(device_budget_bytes=free_bytes, host_budget_bytes=free_bytes)

    monkeypatch.setattr("edgespec.placement.pair_sizes.read_memory", read_memory)
    return read


def test_a_profile_is_matched_against_the_very_placement_that_is_loaded(
    pair: ModelPair, profile: Profile, set_up_here: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's large trees leave fewer layers resident than the default ones: those that were measured with them."""
    large = example_plan(size=768)
    tree = tree_settings(large)
    read = memory_of(pair, monkeypatch, layers=0.5, tree=tree)
    with_plan, with_default = (set_up(pair, RUN, trees).placement for trees in (tree, TreeSettings()))
    assert with_plan.num_resident < with_default.num_resident
    facts = pair_facts(pair.target, pair.draft, RUN, with_plan)
    keep(replace(profile, pair=facts, plans=(replace(profile.plans[1], best=large),)))
    del read[:]
    found = set_up_here()
    assert found.notes == ()
    assert (found.tree, found.placement) == (tree, with_plan)
    assert len(read) == 1, "free memory changes between two looks"
    with Engine(found, self_check=False) as engine:
        assert engine.placement == found.placement
    assert len(read) == 1


def test_a_profile_knows_how_experts_moved_while_it_was_measured(pair: ModelPair) -> None:
    whole = set_up(pair, RUN, TreeSettings()).placement
    apart = replace(whole, experts=ExpertPlacement(num_experts=8, num_kept=2, num_pinned=0, expert_bytes=1))
    found = [
        pair_facts(pair.target, pair.draft, replace(RUN, expert_mode=mode), placement).experts
        for mode, placement in (("auto", whole), ("auto", apart), ("stream", apart), ("cpu", apart))
    ]
    assert found == ["with their layers", "on demand", "on demand", "computed on the CPU"]


def test_experts_are_placed_by_the_use_that_a_profile_measured(tmp_path: Path) -> None:
    folder = save_mixture(tmp_path / "mixture", "qwen3-moe")
    mixture, run_config = open_pair(folder, folder), replace(RUN, limits=MemoryLimits(max_resident_layers=0))
    placement = set_up(mixture, run_config, TreeSettings()).placement
    use = ((0.25, 0.5, 0.125, 1.0),) * placement.num_layers
    profile = example_profile(
        machine=machine_facts(), pair=pair_facts(mixture.target, mixture.draft, run_config, placement),
        acceptance=default_acceptance().to_document(), expert_use=use,
    )  # fmt: skip
    keep(profile)
    found = set_up_by_profile(mixture, run_config, TreeOptions(profile="auto"), temperature=0.8)
    assert found.profile is not None
    assert placement.experts is not None
    assert found.placement.experts == replace(placement.experts, use=use)
    with Engine(found, self_check=False) as engine:
        engine.generate("import os", max_new_tokens=4)
        counted = engine.expert_use
    assert counted is not None
    assert [len(layer) for layer in counted] == [4] * placement.num_layers
    assert 0 < sum(map(sum, counted)) <= 4 * placement.num_layers
    keep(replace(profile, expert_use=use[1:]))
    with pytest.raises(EdgespecError, match="counts the use of") as caught:
        set_up_by_profile(mixture, run_config, TreeOptions(profile="auto"), temperature=0.8)
    assert caught.value.code == "E_PROFILE"


def test_a_profile_whose_trees_leave_other_layers_resident_is_not_used(
    pair: ModelPair, profile: Profile, set_up_here: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was measured with all layers resident: the default trees would leave them so, its own do not."""
    large = example_plan(size=768)
    memory_of(pair, monkeypatch, layers=0.5, tree=tree_settings(large))
    assert set_up(pair, RUN, TreeSettings()).placement.num_resident == profile.pair.resident_layers
    keep(replace(profile, plans=(replace(profile.plans[1], best=large),)))
    found = set_up_here()
    assert is_default(found)
    assert "resident layers was" in found.notes[0]


def test_a_fingerprint_is_of_the_config_too(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(pair_folders[1], tmp_path / "draft")
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert fingerprint(open_model(copy)) != fingerprint(open_model(pair_folders[1]))


FIVE = Workload(num_waiting=9, mean_tokens=50.0, num_texts=5)


def test_several_texts_begin_with_the_plan_for_about_so_many(pair: ModelPair, profile: Profile) -> None:
    small = example_plan(size=4, threshold=0.1, num_texts=4)
    plan = replace(profile.plans[1], by_texts=(small, replace(small, num_texts=32, size=2)))
    keep(replace(profile, plans=(plan,)))
    options: dict[str, Any] = {"trees": TreeOptions(profile="auto"), "temperature": 0.8}
    found = set_up_by_profile(pair, RUN, workload=FIVE, **options)
    assert (found.tree, found.run_config.num_texts) == (tree_settings(small), 5)
    assert found.predicted_per_s is None, "it was promised for four texts"
    assert set_up_by_profile(pair, RUN, **options).tree == tree_settings(plan.best)


def test_a_profile_says_what_a_text_more_takes(profile: Profile) -> None:
    alone = example_plan(step_s=0.3, plain_step_s=0.15, tokens=4.0)
    many = example_plan(step_s=0.6, plain_step_s=0.3, tokens=3.0, num_texts=16)
    shares = pass_shares(profile, replace(profile.plans[0], best=alone, by_texts=(many,)))
    assert shares.text == pytest.approx(0.3 / 15 / (0.15 / 0.15)), "all layers were resident, which is 0.15 of a pass"
    assert shares.tokens(16) == pytest.approx(16 * 0.75)
    assert pass_shares(profile, profile.plans[0]) == PassShares()


def test_caches_of_several_texts_may_displace_layers_of_the_profile(
    pair: ModelPair, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(profile)
    tree = tree_settings(profile.plans[1].best)
    memory_of(
        pair,
        monkeypatch,
        layers=0.5,
        tree=tree,
        run_config=with_workload(
            RUN, FIVE, place=lambda _: pytest.fail("no number is looked for"), shares=PassShares()
        ),
    )
    options: dict[str, Any] = {"trees": TreeOptions(profile="auto"), "temperature": 0.8}
    alone = set_up_by_profile(pair, RUN, **options)
    assert alone.placement.num_resident == alone.placement.num_layers
    found = set_up_by_profile(pair, RUN, workload=FIVE, **options)
    assert found.placement.num_resident < found.placement.num_layers
    assert (found.profile, found.notes) == (profile, ())
