"""A mixture's experts in an estimate: which of them a pass uses, where they come from, and how long that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.estimate.speed import PairOnHardware, SpeedEstimate
    from profiles.roofline import ExpertLoad

GIB = 1 << 30
MIB = 1 << 20
CLEARLY = 1.1  # faster, for a line about kernels that edgespec lacks


def expert_lines(pair: PairOnHardware, estimate: SpeedEstimate) -> list[str]:
    """Return lines about the experts of an estimate; none of a model without experts."""
    experts, load = estimate.likely.experts, estimate.target.experts
    if experts is None or load is None:
        return []
    lines = [] if estimate.nodes else _lines_of_places(pair, load)
    rows = estimate.likely.num_texts * (1 + estimate.nodes)
    sources = {"RAM": experts.link_bytes, "disk": experts.disk_bytes}
    others = [f"{num_bytes / GIB:.2f} GiB from {name}" for name, num_bytes in sources.items() if num_bytes]
    others += [f"{experts.in_place:.3g} computed on the CPU where they lie"] if experts.in_place else []
    lines.append(
        f"  {rows} {'rows ask' if rows > 1 else 'row asks'} for {experts.asked:.0f} experts: "
        f"{' and '.join(others) or 'all are there'}, {experts.elsewhere_s:.3g} s while computing "
        f"{experts.compute_s:.3g} s"
    )
    return lines + _lines_of_kernels(pair, estimate)


def _lines_of_places(pair: PairOnHardware, load: ExpertLoad) -> list[str]:
    """Say how large a mixture's experts are, how many of them stay where, and what is assumed of rows."""
    kept = f"{load.device_kept:.0f} stay on the card, {load.ram_kept:.0f} in RAM"
    if pair.run_config.device.type == "cpu":
        kept = f"{load.device_kept:.0f} stay in RAM"
    elif load.is_on_host:
        kept = f"{load.ram_kept:.0f} stay in RAM, and the CPU computes them"
    rest = ", the rest on disk" if load.ram_kept < load.num_experts else ""
    slow, likely, fast = (getattr(pair.assumptions, case).expert_spread for case in ("slow", "likely", "fast"))
    return [
        f"  experts on demand: a row asks for {load.chosen} of {load.num_experts} in each of {load.num_layers} "
        f"layers, {load.expert_bytes / MIB:.3g} MiB each, {load.all_bytes / GIB:.1f} GiB in all; of a layer "
        f"{kept}{rest}",
        f"  assumed: n rows of a text ask for as many experts as n^{likely:g} independent ones ({fast:g} to {slow:g}); "
        "those asked for last are kept",
    ]


def _lines_of_kernels(pair: PairOnHardware, estimate: SpeedEstimate) -> list[str]:
    """Say what kernels that multiply packed experts on the CPU would make of it, where that is clearly more."""
    from edgespec.estimate.speed import packed_kernels_tokens_per_s

    found = packed_kernels_tokens_per_s(pair, estimate)
    if found is None or found < CLEARLY * estimate.likely.tokens_per_s:
        return []
    return [
        "  computed on the CPU where they lie, by kernels that multiply packed weights, it would be "
        f"{found:.3g} tokens/s; edgespec unpacks them first"
    ]


def expert_facts(pair: PairOnHardware, estimate: SpeedEstimate) -> dict[str, Any]:
    """Return what `expert_lines` says as values for programs; nothing of a model without experts."""
    from edgespec.estimate.speed import packed_kernels_tokens_per_s

    experts, load = estimate.likely.experts, estimate.target.experts
    if experts is None or load is None:
        return {}
    with_kernels = packed_kernels_tokens_per_s(pair, estimate)
    return {
        "layers": load.num_layers,
        "experts_a_layer": load.num_experts,
        "chosen": load.chosen,
        "expert_bytes": round(load.expert_bytes),
        "dense_bytes": estimate.target.layer_bytes,
        "dense_resident_bytes": estimate.target.resident_bytes,
        "kept_on_device": round(load.device_kept, 2),
        "kept_in_ram": round(load.ram_kept, 2),
        "asked": round(experts.asked, 2),
        "link_bytes": round(experts.link_bytes),
        "disk_bytes": round(experts.disk_bytes),
        "computed_on_cpu": round(experts.in_place, 2),
        "elsewhere_s": float(f"{experts.elsewhere_s:.5g}"),
        "compute_s": float(f"{experts.compute_s:.5g}"),
        "tokens_per_s_of_packed_kernels": float(f"{with_kernels:.5g}") if with_kernels else None,
    }
