"""Seconds of a pass as `edgespec estimate` models them, for a mixture on this machine with rates that were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from edgespec.config import MemoryLimits
from edgespec.doctor.machine_speed import MachineSpeed, measure_speed
from edgespec.estimate.experts import ExpertSizes, expert_sizes
from edgespec.estimate.pass_load import model_load
from edgespec.estimate.speed import PairOnHardware, pair_load, place_on, rates_of, step_seconds
from edgespec.pair.folder import ModelFolder
from edgespec.placement.place import PairWeights, pair_weights, read_memory
from edgespec.placement.run_place import resolve_place
from edgespec.tree.settings import TreeSettings
from profiles.hardware import read_assumptions
from profiles.roofline import ModelLoad

CPU = torch.device("cpu")
TEXT_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class PassModel:
    """What is known of a mixture and of this machine before any pass is made."""

    target: ModelFolder
    dtype: str
    weights: PairWeights
    experts: ExpertSizes
    speed: MachineSpeed

    def pass_s(
        self, *, rows: float, num_texts: int, spread: float, limits: MemoryLimits, disk_bytes_per_s: float
    ) -> dict[str, float]:
        """Seconds of a pass over so many rows: with experts on demand, and with whole layers."""
        place = resolve_place(
            self.target.config, None, device="cpu", dtype=self.dtype, context_tokens=TEXT_TOKENS, limits=limits,
            parallel=num_texts,
        )  # fmt: skip
        sheet = read_assumptions().of_measured(disk_bytes_per_s)
        pair = PairOnHardware(
            weights=self.weights, hardware=self.speed.hardware(CPU), assumptions=sheet, place=place,
            memory=read_memory(limits, CPU),
        )  # fmt: skip
        placed = place_on(pair, TreeSettings(policy="none"))
        load, rates = pair_load(pair, placed), rates_of(pair, replace(sheet.fast, expert_spread=spread))
        on_demand = load.target if limits.max_resident_layers is None else _with_nothing_kept(load.target)
        whole = model_load(placed.target, placed.placement, keys=TEXT_TOKENS, num_texts=num_texts, device=CPU)
        nodes = max(0, round(rows / num_texts) - 1)
        return {
            name: step_seconds(replace(load, target=one), rates, num_texts, nodes=nodes, depth=1, tokens=1.0).pass_s
            for name, one in (("on_demand_s", on_demand), ("whole_layers_s", whole))
        }


def pass_model(target: ModelFolder, *, dtype: str) -> PassModel:
    """Measure this machine, and look at a mixture's headers."""
    place = resolve_place(target.config, None, device="cpu", dtype=dtype)
    weights = pair_weights(target, None, place)
    experts = expert_sizes(weights.target, CPU)
    if experts is None:
        raise SystemExit(f"'{target.folder}' is no mixture of experts")
    return PassModel(target=target, dtype=dtype, weights=weights, experts=experts, speed=measure_speed(CPU))


def _with_nothing_kept(load: ModelLoad) -> ModelLoad:
    """The load where nothing that was read for one pass serves the next."""
    assert load.experts is not None
    experts = replace(load.experts, device_kept=0.0, ram_kept=0.0)
    return replace(load, resident_bytes=0, disk_bytes=load.disk_bytes + load.resident_bytes, experts=experts)
