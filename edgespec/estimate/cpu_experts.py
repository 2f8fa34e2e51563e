"""What it would be to compute experts on the CPU, where they lie, instead of moving them to the card.

This is an estimate of a thing that is not built: nothing here is promised. Experts on the card are computed there.
The others take as long as RAM takes to hand them to the CPU, or, where packed weights are unpacked first, as
torch takes for that. Rows are small: what they take over the link is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.estimate.speed import PairOnHardware, SpeedEstimate, rates_of
from profiles.roofline import ExpertLoad, Rates, expert_seconds

IS_BUILT = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuExperts:
    """Tokens a second of all texts, the likely case."""

    unpacking: float  # with packed weights unpacked in torch; of plain weights the same as `direct`
    direct: float  # with kernels that multiply packed weights, as llama.cpp has


def cpu_experts(pair: PairOnHardware, estimate: SpeedEstimate) -> CpuExperts | None:
    """Return the speed of an estimate's trees with experts computed where they lie; None where none lie elsewhere."""
    step, places = estimate.likely, estimate.places
    if step.experts is None or places is None or pair.place.device.type == "cpu":
        return None
    if places.device_kept >= places.sizes.num_experts:
        return None
    rates = rates_of(pair, pair.assumptions.likely)
    rows = step.num_texts * (1 + estimate.nodes)
    load = places.load()
    other_s = step.step_s - step.experts.seconds

    def tokens_per_s(expert_s: float) -> float:
        experts_s = _seconds(load, rates, rows=rows, num_texts=step.num_texts, expert_s=expert_s)
        return step.num_texts * step.tokens / (other_s + experts_s)

    read_s = load.expert_bytes / pair.assumptions.host_memory_bytes_per_s
    is_packed = bool(load.unpacked_bytes)
    unpack_s = places.sizes.num_weights / pair.assumptions.host_unpack_weights_per_s if is_packed else 0.0
    return CpuExperts(unpacking=tokens_per_s(max(read_s, unpack_s)), direct=tokens_per_s(read_s))


def _seconds(load: ExpertLoad, rates: Rates, *, rows: int, num_texts: int, expert_s: float) -> float:
    """Return the seconds of a pass's experts, those that are not on the card on the CPU for `expert_s` each."""
    moved = expert_seconds(load, rates, rows=rows, num_texts=num_texts)
    elsewhere = (moved.link_bytes + moved.disk_bytes) / load.expert_bytes
    disk_s = moved.disk_bytes / rates.disk_bytes_per_s
    return max(moved.compute_s * (1 - elsewhere / moved.asked), disk_s, elsewhere * expert_s)
