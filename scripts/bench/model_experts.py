"""Seconds of a pass as `edgespec estimate` models them, for a mixture on this machine with rates that were measured.

One thing is known here and not to an estimate: how many rows came before, whose experts are all that memory can have
kept.
"""

from dataclasses import dataclass, replace

import torch

from edgespec.config import MemoryLimits
from edgespec.doctor.machine_speed import MachineSpeed, measure_speed
from edgespec.estimate.speed import PairOnHardware, load_there, place_on, rates_of
from edgespec.pair.folder import ModelFolder
from edgespec.placement.expert_load import mixture_sizes
from edgespec.placement.place import PairWeights, pair_weights, read_memory
from edgespec.placement.run_config import resolve_run_config
from edgespec.placement.step_seconds import step_seconds
from edgespec.tree.settings import TreeSettings
from profiles.hardware import read_assumptions
from profiles.roofline import ExpertLoad, ModelLoad

CPU = torch.device("cpu")
TEXT_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class PassModel:
    """What is known of a mixture and of this machine before any pass is made."""

    target: ModelFolder
    dtype: str
    weights: PairWeights
    experts: ExpertLoad
    speed: MachineSpeed

    def pass_s(
        self,
        *,
        rows: float,
        rows_before: float,
        num_texts: int,
        spread: float,
        limits: MemoryLimits,
        disk_bytes_per_s: float,
    ) -> dict[str, float]:
        """Seconds of a pass over so many rows, of which each text has its part: with experts on demand, and whole."""
        found = {}
        for name, experts in (("on_demand_s", "auto"), ("whole_layers_s", "stream")):
            run_config = resolve_run_config(
                self.target, None, device="cpu", dtype=self.dtype, context_tokens=TEXT_TOKENS, limits=limits,
                parallel=num_texts, experts=experts,
            )  # fmt: skip
            sheet = read_assumptions().of_measured(disk_bytes_per_s)
            pair = PairOnHardware(
                weights=self.weights, hardware=self.speed.hardware(CPU), assumptions=sheet, run_config=run_config,
                memory=read_memory(limits, CPU),
            )  # fmt: skip
            calls = {"layer_call_s": sheet.likely.layer_call_s, "expert_call_s": sheet.likely.expert_call_s}
            achieved = replace(sheet.fast, expert_spread=spread, **calls)
            placed, rates = place_on(pair, TreeSettings(policy="none")), rates_of(pair, achieved)
            load = load_there(pair, placed)
            target = load.target
            if target.experts is not None and placed.placement.experts is not None:
                seen = target.experts.routing(spread).distinct(rows_before, num_texts=num_texts)
                target = _with_kept(target, min(target.experts.device_kept, seen))
            nodes = max(0, round(rows / num_texts) - 1)
            step = step_seconds(replace(load, target=target), rates, num_texts, nodes=nodes, depth=1, tokens=1.0)
            found[name] = step.pass_s
        return found


def pass_model(target: ModelFolder, *, dtype: str) -> PassModel:
    """Measure this machine, and look at a mixture's headers."""
    run_config = resolve_run_config(target, None, device="cpu", dtype=dtype)
    weights = pair_weights(target, None, run_config)
    sizes = mixture_sizes(weights.target, CPU)
    if sizes is None:
        raise SystemExit(f"'{target.folder}' is no mixture of experts")
    return PassModel(target=target, dtype=dtype, weights=weights, experts=sizes.experts, speed=measure_speed(CPU))


def _with_kept(load: ModelLoad, kept: float) -> ModelLoad:
    """The load where memory has so many of a layer's experts."""
    assert load.experts is not None
    return replace(load, experts=replace(load.experts, device_kept=kept, ram_kept=kept))
