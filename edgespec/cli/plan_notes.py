"""What is said of a plan before weights are read, and while they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import Console, OnProgress
from edgespec.cli.options.options import MachineOptions, check_all_resident
from edgespec.pair.hub_names import short_name
from edgespec.tree.settings import TreeSettings

if TYPE_CHECKING:
    import torch

    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.plan import PairPlan
    from edgespec.profiled import Settled

GIB = 1 << 30


def trees_in_words(tree: TreeSettings) -> str:
    """Say policy, nodes and depth of the trees, or that there are none."""
    if tree.policy == "none":
        return "no tree"
    return f"{tree.policy} trees of {tree.num_nodes} nodes, depth {tree.num_layers}"


def say_plan(
    console: Console,
    pair: ModelPair,
    tree: TreeSettings,
    planned: Engine | PairPlan,
    settled: Settled,
    machine: MachineOptions,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Say layers, formats, trees and profile in a few lines; raises EdgespecError where -ngl all does not fit."""
    placement = planned.placement
    streamed = placement.num_layers - placement.num_resident
    where = "" if not placement.num_pinned else f" ({placement.num_pinned} from RAM, {placement.num_on_disk} from disk)"
    layers = f"{placement.num_resident} of {placement.num_layers} layers resident"
    if streamed:
        layers += f", {streamed} streamed{where}, {placement.streamed_bytes / GIB:.3f} GiB a pass"
    numbers = str(dtype).removeprefix("torch.") + (f" from {machine.quant}" if machine.quant else "")
    console.say(f"{short_name(pair.target.folder)}: {layers}; {numbers} on {device}; {trees_in_words(tree)}")
    console.detail(f"target: {pair.target.folder}")
    if not tree.is_lossless:
        console.say(
            f"LOSSY: --target-width {tree.target_width} takes the longest of so many branches that the target "
            "starts; the output does not have the target's distribution"
        )
    console.detail(f"memory plan:\n{placement.table()}")
    if settled.plan is not None:
        console.say(_profile_note(settled))
    if machine.limits.max_gpu_bytes is not None and device.type == "cpu":
        console.say("--max-gpu-mem is not used: the device is the CPU")
    if machine.limits.gpu_margin_bytes is not None and device.type == "cpu":
        console.say("--gpu-margin is not used: the device is the CPU")
    if machine.draft_quant is not None and tree.policy == "none":
        console.say("--draft-quant is not used: there is no draft")
    check_all_resident(machine, placement.num_resident, placement.num_layers)


def say_quantizing(console: Console, folder: Path, num_bytes: int, free_bytes: int) -> None:
    """Say what is about to be written to the cache."""
    console.say(f"quantising once: {num_bytes / GIB:.3f} GiB go to {folder} ({free_bytes / GIB:.1f} GiB are free)")


def loading_progress(console: Console, bar: Any) -> Callable[[str, int, int], None]:
    """Return the function that `Engine` reports its loading to; it draws on the bar, if there is one."""
    phases: dict[str, OnProgress] = {}

    def update(phase: str, done: int, total: int) -> None:
        is_layers = phase.startswith("quantising")
        if phase not in phases:
            phases[phase] = console.task(bar, phase)
        phases[phase](done, total, f"{done} of {total} layers" if is_layers else f"{done >> 20} of {total >> 20} MiB")

    return update


def _profile_note(settled: Settled) -> str:
    """Say which profile is used, for which temperature, and what it promises."""
    assert settled.profile is not None
    assert settled.plan is not None
    predicted = settled.predicted_per_s
    promise = ", overridden by flags" if predicted is None else f", {predicted:.3g} tokens/s predicted"
    return f"profile {settled.profile.name}: plan for temperature {settled.plan.temperature:g}{promise}"
