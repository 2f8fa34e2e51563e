"""Speeds on hardware, here or elsewhere, for `edgespec estimate`: lines for people, facts for programs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import counted
from edgespec.cli.estimate.experts import expert_facts, expert_lines
from edgespec.cli.spelling import spelled
from edgespec.config import require
from edgespec.tree.settings import TreeSettings, preset_shape

if TYPE_CHECKING:
    from edgespec.estimate.speed import PairOnHardware, SpeedEstimate
    from edgespec.placement.acceptance import AssumedAcceptance
    from edgespec.placement.place import PlacedWeights

GIB = 1 << 30
CASES = ("slow", "likely", "fast")
STEP_FACTS = ("step_s", "draft_s", "pass_s", "stream_s", "compute_s")
SHARES = ("memory", "compute", "link", "disk", "layer_call_s")
EXPERT_SHARES = ("expert_call_s", "expert_spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The speed of a pair on its hardware, without a tree and with one."""

    pair: PairOnHardware
    plain: SpeedEstimate
    tree: SpeedEstimate | None  # None: there is no draft, or trees are switched off
    acceptance: AssumedAcceptance | None
    is_preset: bool  # the settings alone decide on the tree
    is_built_in: bool  # the pair is the built-in one

    @property
    def weights(self) -> PlacedWeights:
        """The placement of the weights for the best tree, or without one."""
        return (self.tree or self.plain).weights


def estimate_speeds(
    pair: PairOnHardware, tree: TreeSettings, *, temperature: float | None, size: int | None, is_built_in: bool
) -> Speeds:
    """Estimate plain decoding and the best tree; `size` is None where any budget will do. Raises EdgespecError.

    `is_built_in` says that the pair is the built-in one, whose acceptance is known.
    """
    from edgespec.estimate.speed import estimate_best, estimate_plain
    from edgespec.placement.acceptance import acceptance_of_draft

    acceptance = acceptance_of_draft(pair.weights, tree, temperature, is_built_in=is_built_in)
    plain = estimate_plain(pair)
    wants_tree = tree.needs_draft
    return Speeds(
        pair=pair,
        plain=plain,
        tree=estimate_best(pair, tree, acceptance.rates, size=size) if wants_tree else None,
        acceptance=acceptance if wants_tree else None,
        is_preset=preset_shape(tree) is not None,
        is_built_in=is_built_in,
    )


def refuse_without_hardware(tree: TreeSettings, temperature: float | None) -> None:
    """Raise EdgespecError for options that only speeds depend on, where they are not known."""
    from edgespec.placement.acceptance import acceptance_rate

    fix = "Name a card: --hardware rtx-4090."
    require(temperature is None, f"--temp {temperature} changes no memory plan.", fix)
    require(acceptance_rate(tree.acceptance) is None, f"--acceptance {tree.acceptance} changes no memory plan.", fix)


def refuse_other_device(hardware: str, device: str, kind: str) -> None:
    """Raise EdgespecError where --device contradicts the hardware."""
    require(
        device == "auto" or device.partition(":")[0] == kind,
        f"--device {device} contradicts --hardware {hardware}, which is a {kind} device.",
        "Leave out one of them.",
    )


def speed_lines(speeds: Speeds) -> list[str]:
    """Return lines about the machine, what is assumed of it, and tokens a second."""
    pair, plain, tree = speeds.pair, speeds.plain, speeds.tree
    card = pair.hardware
    half = pair.run_config.dtype.itemsize == 2
    link = f", {card.link}" if card.link else ""
    measured = card.sources.get("all")
    lines = [
        f"{card.name}: {card.title}; {card.memory_bytes / GIB:.0f} GiB at "
        f"{card.weight_bytes_per_s(half=half) / 1e9:.0f} GB/s, "
        f"{card.flops_per_s(half=half) / 1e12:.3g} TFLOP/s in {str(pair.run_config.dtype).removeprefix('torch.')}{link}"
        + (f"; {measured} (again: --measure)" if measured else ""),
        *([f"note: {card.note}"] if card.note else []),
        f"assumed: {_assumed(pair)}",
        *_kernel_lines(speeds),
        f"plain decoding: {plain.likely.step_s:.3g} s a pass, {_tokens_per_s(plain)}",
        *expert_lines(pair, plain),
    ]
    if tree is None or speeds.acceptance is None:
        return lines
    likely = tree.likely
    lines += [
        f"acceptance: {speeds.acceptance.about}",
        *([f"  {spelled(speeds.acceptance.hint)}"] if speeds.acceptance.hint and not speeds.is_built_in else []),
        f"{'tree' if speeds.is_preset else 'best tree'}: "
        f"{counted(tree.nodes, 'node')} in {counted(tree.depth, 'layer')}, "
        f"{likely.tokens:.2f} tokens a pass{' and text' if likely.num_texts > 1 else ''}, {_tokens_per_s(tree)}",
        f"  {likely.step_s:.3g} s a step: drafting {likely.draft_s:.3g} s, then a pass of {likely.pass_s:.3g} s "
        f"(streaming {likely.stream_s:.3g} s while computing {likely.compute_s:.3g} s"
        + (f", experts {likely.experts.seconds:.3g} s)" if likely.experts else ")"),
        *(expert_lines(pair, tree) if likely.experts else []),
    ]
    if plain.likely.tokens_per_s >= likely.tokens_per_s:
        lines.append("  no tree pays here: decode without one (--policy none)")
    return lines


def _kernel_lines(speeds: Speeds) -> list[str]:
    """Say how fast packed weights are multiplied as they are."""
    return [
        f"{kernel['format']} is multiplied as it is packed"
        + (f", by up to {kernel['max_rows']} rows" if kernel["max_rows"] else "")
        + f": {kernel['one_row_weights_per_s'] / 1e9:.3g} thousand million weights a second by one row, "
        f"{kernel['row_weights_per_s'] / 1e9:.3g} by each of many ({_source_of(kernel)})"
        for kernel in _kernel_facts(speeds)
    ]


def _source_of(kernel: dict[str, Any]) -> str:
    return "measured" if kernel["is_measured"] else "assumed: as memory is read and as float32 computes"


def _kernel_facts(speeds: Speeds) -> list[dict[str, Any]]:
    """Return the likely rates of the kernels that multiply the target's packed weights, by format."""
    from edgespec.estimate.speed import rates_of

    rates = rates_of(speeds.pair, speeds.pair.assumptions.likely)
    return [
        {
            "format": packed.packed_format,
            "max_rows": packed.max_rows if packed.max_rows < sys.maxsize else None,
            "one_row_weights_per_s": float(f"{rates.kernel(packed).one_row:.5g}"),
            "row_weights_per_s": float(f"{rates.kernel(packed).each_row:.5g}"),
            "is_measured": packed.packed_format in rates.kernels,
        }
        for packed in speeds.plain.target.multiplied
    ]


def speed_facts(speeds: Speeds) -> dict[str, Any]:
    """Return what `speed_lines` says as values for programs."""
    pair, acceptance = speeds.pair, speeds.acceptance
    assumed = {
        "host_memory_bytes": None if _knows_host(pair) else pair.assumptions.host_memory_bytes,
        "host_disk_bytes_per_s": pair.assumptions.host_disk_bytes_per_s,
        "usable_memory": pair.assumptions.usable_memory,
        **{name: {case: getattr(getattr(pair.assumptions, case), name) for case in CASES} for name in _shares(speeds)},
    }
    return {
        "hardware": pair.hardware.name,
        "hardware_title": pair.hardware.title,
        "assumed": assumed,
        "kernels": _kernel_facts(speeds),
        "acceptance": acceptance.about if acceptance else None,
        "acceptance_by_rank": [round(rate, 5) for rate in acceptance.rates] if acceptance else None,
        "plain": _facts(pair, speeds.plain),
        "tree": _facts(pair, speeds.tree) if speeds.tree else None,
    }


def _shares(speeds: Speeds) -> tuple[str, ...]:
    return SHARES + EXPERT_SHARES if speeds.plain.target.experts else SHARES


def _facts(pair: PairOnHardware, estimate: SpeedEstimate) -> dict[str, Any]:
    from edgespec.placement.pass_load import moved_bytes

    cases = {case: getattr(estimate, case) for case in CASES}
    return {
        "nodes": estimate.nodes,
        "depth": estimate.depth,
        "texts": estimate.likely.num_texts,
        "tokens_per_pass": round(estimate.likely.tokens, 4),
        "resident_layers": estimate.weights.placement.num_resident,
        "pass_bytes": moved_bytes(estimate.weights.target, estimate.weights.placement),
        **{
            name: {case: float(f"{getattr(found, name):.5g}") for case, found in cases.items()}
            for name in ("tokens_per_s", *STEP_FACTS)
        },
        **({"experts": facts} if (facts := expert_facts(pair, estimate)) else {}),
    }


def _tokens_per_s(estimate: SpeedEstimate) -> str:
    low, likely, high = (getattr(estimate, case).tokens_per_s for case in CASES)
    count = estimate.likely.num_texts
    together = f" of all {count} texts together" if count > 1 else ""
    token_s = 1 / likely
    in_words = f"{token_s / 60:.1f} minutes a token" if token_s >= 90 else f"{token_s:.1f} seconds a token"
    slowly = f", {in_words}" if likely < 1 else ""
    return f"{likely:.3g} tokens/s ({low:.3g} to {high:.3g}){together}{slowly}"


def _assumed(pair: PairOnHardware) -> str:
    """Say the assumptions for what neither options nor the data sheet state."""
    assumptions, likely = pair.assumptions, pair.assumptions.likely
    parts = [f"{likely.memory:.0%} of its bandwidth and {likely.compute:.0%} of its arithmetic are reached"]
    if pair.hardware.device == "cuda":
        parts.append(f"{likely.link:.0%} of the link")
        if not _knows_host(pair):
            parts.append(f"{assumptions.host_memory_bytes / GIB:.0f} GiB of RAM (--max-cpu-mem)")
    parts.append(f"a disk of {likely.disk * assumptions.host_disk_bytes_per_s / 1e9:.1f} GB/s")
    return ", ".join(parts)


def _knows_host(pair: PairOnHardware) -> bool:
    """Whether the RAM beside the card was given, or is the device's own."""
    return pair.run_config.limits.max_cpu_bytes is not None or pair.hardware.device == "cpu"
