"""What kernels that multiply packed weights on the CPU would make of experts that it computes where they lie.

edgespec unpacks such experts first, by torch, which takes longer than reading them. llama.cpp has such kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.estimate.speed import PairOnHardware, SpeedEstimate, rates_of
from profiles.roofline import expert_seconds


def packed_kernels_tokens_per_s(pair: PairOnHardware, estimate: SpeedEstimate) -> float | None:
    """Return the likely tokens a second of all texts with such kernels; None where no packed experts lie elsewhere."""
    step, places = estimate.likely, estimate.places
    if step.experts is None or places is None or pair.run_config.device.type == "cpu":
        return None
    load = places.load()
    if not load.unpacked_bytes or load.device_kept >= load.num_experts:
        return None
    rates = replace(rates_of(pair, pair.assumptions.likely), host_unpack_weights_per_s=math.inf)
    rows = step.num_texts * (1 + estimate.nodes)
    experts = expert_seconds(load, rates, rows=rows, num_texts=step.num_texts)
    return step.num_texts * step.tokens / (step.step_s - step.experts.seconds + experts.seconds)
