"""A target's own layer drafts by default where an estimate of the same hardware has a tree that pays, only there."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import EdgespecError, MemoryLimits, TreeSettings
from edgespec.cli import run as run_command
from edgespec.estimate.speed import PairOnHardware, estimate_best, estimate_plain, memory_there, open_hardware
from edgespec.grow.acceptance import Measured, default_acceptance
from edgespec.pair.drafts import planned_draft
from edgespec.pair.folder import open_architecture
from edgespec.pair.pair import open_pair
from edgespec.placement import kept_speed, pair_setup
from edgespec.placement.acceptance import AssumedAcceptance
from edgespec.placement.kept_speed import SCHEMA, MachineSpeed, device_name, disk_of, hardware_here, keep_speed
from edgespec.placement.own_layer import acceptance_of_layer, steps_at, weigh_own_layer
from edgespec.placement.place import pair_weights, place_weights
from edgespec.placement.run_config import RunConfig, resolve_run_config
from edgespec.tree.settings import TreeOptions
from tests.edgespec.draft.mtp_target import write_target
from tests.support.published_configs import GLM_AIR

CPU = torch.device("cpu")


@pytest.mark.parametrize(("card", "quant", "drafts"), [("rtx-4090", "nf4", False), ("a100-80gb", "nf4", True)])
def test_the_choice_is_the_estimates(card: str, quant: str, drafts: bool, tmp_path: Path) -> None:
    """GLM-4.5-Air: on one card experts move for a second row, on the other they all stay."""
    (tmp_path / "config.json").write_text(json.dumps(GLM_AIR), encoding="utf-8")
    target, draft = planned_draft(None, open_architecture(tmp_path))
    hardware, assumptions = open_hardware(card)
    run_config = resolve_run_config(
        target, None, draft=draft, is_planned_only=True, device=hardware.device, context_tokens=2048,
        quant=quant, draft_quant=quant,
    )  # fmt: skip
    weights, memory = pair_weights(target, draft, run_config), memory_there(hardware, assumptions, run_config.limits)
    place = partial(place_weights, weights, run_config=run_config, memory=memory)
    acceptance = acceptance_of_layer(weights, TreeSettings(), None)
    found = weigh_own_layer(TreeSettings(), place, steps_at(hardware, assumptions, run_config), acceptance)
    pair = PairOnHardware(
        weights=weights, hardware=hardware, assumptions=assumptions, run_config=run_config, memory=memory
    )
    best = estimate_best(pair, TreeSettings(), acceptance.rates, size=None)
    pays = best.likely.tokens_per_s > estimate_plain(pair).likely.tokens_per_s
    assert found.drafts == pays == drafts


def test_a_layer_that_does_not_fit_is_left_out_in_one_line() -> None:
    """Below what lacks stands the plan of a run that does not come."""

    def place(tree: TreeSettings) -> Any:
        if tree.needs_draft:
            raise EdgespecError("E_MEMORY", "12.1 GiB are needed, 1.3 GiB more than the limit:\n  GPU  table", "Less.")

    found = weigh_own_layer(TreeSettings(), place, lambda _: lambda *_: 1.0, AssumedAcceptance(rates=(1.0,), about=""))
    assert not found.drafts
    assert found.why.endswith("does not draft: 12.1 GiB are needed, 1.3 GiB more than the limit")


def test_a_machine_that_was_measured_counts_as_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    assert hardware_here(CPU, [])[0].name == "cpu"
    keep_speed(
        MachineSpeed(
            schema=SCHEMA, device_name=device_name(CPU), threads=torch.get_num_threads(), created="2026-01-02",
            memory_bytes_per_s=10e9, half_memory_bytes_per_s=5e9, half_flops_per_s=0.05e12, float32_flops_per_s=0.1e12,
            kernels={}, link_bytes_per_s=None, disks={disk_of([]): 3e9},
        )
    )  # fmt: skip
    hardware, assumptions = hardware_here(CPU, [])
    assert hardware.memory_bytes_per_s == 10e9
    assert assumptions.host_disk_bytes_per_s == 3e9


@pytest.mark.parametrize(("name", "found"), [("NVIDIA GeForce RTX 3060", "rtx-3060"), ("NVIDIA T1000", "rtx-4070")])
def test_a_card_counts_as_its_data_sheet_says_or_as_a_common_one(
    name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert kept_speed.hardware_here(torch.device("cuda"), [])[0].name == found


@pytest.mark.parametrize(
    ("rate", "node_costs", "drafts"), [(None, 1.4, True), (0.3, 1.4, False), (None, 1.9, False), (0.7, 1.6, True)]
)
@pytest.mark.parametrize("by_profile", [True, False])
def test_acceptance_that_the_user_has_measured_decides(
    rate: float | None, node_costs: float, drafts: bool, by_profile: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A step with one node takes `node_costs` times as long, others far longer: it pays where that node is right."""
    pair = open_pair(write_target(tmp_path / "target", "glm4_moe")[0], None)
    options: dict[str, Any] = {}
    if rate is not None:
        options["acceptance"] = tmp_path / "acceptance.json"
        # Of two temperatures and two draws, one entry is the run's.
        entries = [
            Measured(draw="coupled", temperature=0.0, rates=(rate,)),
            Measured(draw="coupled", temperature=1.0, rates=(1 - rate,)),
            Measured(draw="sampled", temperature=0.0, rates=(1 - rate,)),
        ]
        replace(default_acceptance(), measured=tuple(entries)).save(options["acceptance"])
    monkeypatch.setattr(
        pair_setup, "steps_here", lambda *_: lambda _placed: lambda nodes, _depth, _tokens: node_costs**nodes
    )
    trees = TreeOptions(explicit=options, profile="none")
    run = RunConfig(device=CPU, dtype=torch.float32, limits=MemoryLimits(), context_tokens=64, prompt_tokens=16)
    if by_profile:
        setup = pair_setup.set_up_by_profile(pair, run, trees, temperature=0.0)
    else:
        setup = pair_setup.set_up(pair, run, trees.settings)
    assert (setup.pair.draft is not None) == drafts
    assert any("acceptance.json" in note for note in setup.notes) == (rate is not None)


@pytest.mark.parametrize("rate", ["0.05", "0.9"])
def test_an_estimates_rate_decides_on_the_layer(rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM_AIR), encoding="utf-8")
    options = ["--hardware", "a100-80gb", "--quant", "nf4", "--draft-quant", "nf4", "--acceptance", rate]
    assert run_command(["estimate", str(tmp_path), *options]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "multi-token-prediction" in line]
    assert ("layer drafts: " in line) == (rate == "0.9")
