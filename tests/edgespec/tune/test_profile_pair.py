"""A pair measured in seconds: the profile that comes out can be kept, read and followed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edgespec import EdgespecError, Engine, TreeSettings
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.measured import acceptance_of
from edgespec.pair.pair import open_pair
from edgespec.placement.pair_profile import changes_between, tree_settings
from edgespec.tree.policies import DRAWS
from edgespec.tune import contest, costs
from edgespec.tune.entrants import contenders
from edgespec.tune.profile_pair import profile_pair
from edgespec.tune.run import Effort, Run
from profiles.files import read_profile, write_profile
from profiles.measure import machine_facts
from profiles.schema import Profile

TINY = Effort(budget_s=0.5, most_s=0.5, steps_per_prompt=1, fits_acceptance=False)
TEMPERATURES = (0.0, 0.8)
PROMPTS = ("def read_lines(path):\n    ", "import os\n\n\nclass Folder:\n")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tree = TreeSettings(policy="opt-tree", size=16)
    with Engine.from_pair(open_pair(None, None), tree=tree, context_tokens=256, self_check=False) as made:
        yield made


@pytest.fixture(scope="module")
def run(engine: Engine) -> Run:
    return Run(
        engine=engine, prompts=[engine.encode(prompt) for prompt in PROMPTS], temperatures=TEMPERATURES, effort=TINY
    )


@pytest.fixture(scope="module")
def stages() -> list[tuple[str, float]]:
    return []


@pytest.fixture(scope="module", autouse=True)
def _one_round() -> Iterator[None]:
    """Nobody asks here how long things take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "SITTINGS", 1)
        patch.setattr(costs, "LONG_SITTINGS", 1)
        yield


@pytest.fixture(scope="module")
def profile(run: Run, stages: list[tuple[str, float]]) -> Profile:
    torch.set_num_threads(1)
    return profile_pair(replace(run, report=lambda stage, share: stages.append((stage, share))), default_acceptance())


def test_a_measured_profile_is_read_back_as_it_was(profile: Profile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "p.toml")
    assert read_profile(tmp_path / "p.toml") == profile


@pytest.mark.parametrize(("fewest", "is_fitted"), [(1, True), (1000, False)])
def test_a_model_of_the_pairs_own_is_fitted_where_it_saw_enough_places(
    fewest: int, is_fitted: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(contest, "FIT_PLACES", fewest)
    monkeypatch.setattr(contest, "fitted", lambda _records, seed: asked.append(seed))
    full = replace(run, effort=replace(TINY, fits_acceptance=True), temperatures=(0.0,))
    profile_pair(full, default_acceptance())
    assert bool(asked) == is_fitted


def test_it_is_of_this_machine_and_pair(profile: Profile) -> None:
    assert changes_between(profile, machine_facts(), profile.pair) == []
    assert (profile.pair.target, profile.pair.draft, profile.pair.dtype) == ("target", "draft", "float32")
    assert profile.pair.resident_layers == profile.pair.num_layers


def test_it_is_known_by_the_plan_where_less_memory_could_be_locked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run looks for it by its own plan, before anything is locked."""
    placement = run.engine.placement
    planned = replace(placement, resident_layers=placement.resident_layers - {0}, pinned_layers=frozenset({0}))
    monkeypatch.setattr(run.engine, "planned", planned)
    found = profile_pair(replace(run, temperatures=(0.0,)), default_acceptance())
    assert (found.pair.ram_layers, found.pair.disk_layers) == (1, 0)


def test_there_is_a_plan_for_every_temperature_no_slower_than_plain_decoding(profile: Profile) -> None:
    assert tuple(plan.temperature for plan in profile.plans) == TEMPERATURES
    for plan in profile.plans:
        assert plan.plain.policy == "none"
        assert plan.best.measured_step_s is not None
        assert plan.runner_up is not None
        assert plan.plain.tokens_per_s <= plan.best.tokens_per_s * (1 + TINY.rule.least_gain)
        assert plan.best.size <= 16
        tree_settings(plan.best)


def test_costs_were_timed_for_every_contender_and_size(profile: Profile) -> None:
    assert [timing.count for timing in profile.verify] == [0, 1, 2, 4, 8, 16]
    assert [timing.count for timing in profile.draft] == [1, 2, 4, 8, 16]
    everybody = {contender.key for contender in contenders(size=16, depth=16)}
    assert {(cost.policy, cost.draw) for cost in profile.growth} == everybody


def test_the_pairs_acceptance_and_its_reliability_are_kept(profile: Profile) -> None:
    model = AcceptanceModel.from_document(profile.acceptance, Path("p.toml"))
    assert model.to_document() == acceptance_of(profile).to_document()
    assert {(found.draw, found.temperature) for found in model.measured} == {
        (draw, temperature) for draw in DRAWS for temperature in TEMPERATURES
    }
    assert sum(bucket.weight for bucket in profile.reliability.buckets) == pytest.approx(1.0)


def test_every_stage_reports_to_its_end(profile: Profile, stages: list[tuple[str, float]]) -> None:
    names = list(dict.fromkeys(stage for stage, _ in stages))
    assert names == [
        "trying sizes",
        "timing",
        "timing texts together",
        "learning acceptance",
        "comparing trees",
        "trying plans",
    ]
    for name in names:
        shares = [share for stage, share in stages if stage == name]
        assert shares == sorted(shares)
        assert shares[-1] <= 1


def test_without_a_draft_there_is_nothing_to_profile(run: Run) -> None:
    with (
        Engine.from_pair(replace(run.engine.pair, draft=None), self_check=False) as plain,
        pytest.raises(EdgespecError, match="no draft"),
    ):
        profile_pair(replace(run, engine=plain), default_acceptance())


def test_a_draft_that_is_of_no_use_is_measured_to_the_end(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Some policies then grow nothing, and some ranks are never accepted."""
    tree = TreeSettings(policy="opt-tree", size=16)
    with Engine.from_pair(open_pair(*pair_folders), tree=tree, context_tokens=128, self_check=False) as engine:
        prompts = [engine.encode(prompt) for prompt in ("def main(", "import os")]
        run = Run(engine=engine, prompts=prompts, temperatures=TEMPERATURES, effort=TINY)
        profile = profile_pair(run, default_acceptance())
    write_profile(profile, tmp_path / "p.toml")
    assert read_profile(tmp_path / "p.toml") == profile
    for temperature in TEMPERATURES:
        for draw in DRAWS:
            assert acceptance_of(profile).rank_acceptance(temperature, draw)[0] > 0
