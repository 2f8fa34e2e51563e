"""Estimates of a pair on hardware, here or elsewhere: its placement, seconds a step, and the best tree.

This module is the boundary to hardware profiles: what goes wrong there leaves here as EdgespecError. Trees are
Sequoia's, the best static ones for an acceptance by rank. Grown trees yield more from the same acceptance, so
they are no slower than this says. Experts of a mixture move on demand: each node adds those that it needs.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.config import MAX_TREE_SIZE, MemoryLimits
from edgespec.draft.own_parts import calls_of
from edgespec.errors import EdgespecError, profile_errors
from edgespec.grow.sequoia import sequoia_table
from edgespec.machine.environment import locks_little
from edgespec.machine.torch_threads import torch_threads
from edgespec.placement.place import MARGIN_BYTES, Memory, PairWeights, PlacedWeights, memory_within, place_weights
from edgespec.placement.run_config import RunConfig
from edgespec.placement.step_seconds import PairLoad, StepSeconds, pair_load, step_seconds
from edgespec.tree.settings import TreeSettings, preset_shape
from edgespec.tree.shapes import TreeShape
from edgespec.tuning.draft_memory import MeanGrowth
from offload.placement import NUM_STAGING_BUFFERS, STAGING_BYTES
from profiles.hardware import Achieved, Assumptions, Hardware, read_assumptions, read_hardware
from profiles.roofline import ModelLoad, Rates, achieved_rates, expert_seconds

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, MAX_TREE_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOnHardware:
    """A pair, known by size, and the machine that it is to run on."""

    weights: PairWeights
    hardware: Hardware
    assumptions: Assumptions
    run_config: RunConfig
    memory: Memory  # that may be used there
    draws: bool = False  # tokens above temperature 0
    locked_bytes: float = math.inf  # that can wait in locked memory beside staging buffers
    is_here: bool = False  # on the machine of this process, which earlier runs have measured
    core_share: float = 1.0  # of a core's time that other programs leave, as `hardware` has it
    growth: MeanGrowth | None = None  # what a tree of the draft's took in these


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """A tree on a placement, in three cases of how much of the data sheet's rates is reached."""

    weights: PlacedWeights
    nodes: int  # below the root; 0 is plain decoding
    depth: int
    target: ModelLoad
    slow: StepSeconds
    likely: StepSeconds
    fast: StepSeconds


def open_hardware(name: str) -> tuple[Hardware, Assumptions]:
    """Return a known card or CPU, and the assumptions beyond its data sheet; raises EdgespecError."""
    with profile_errors():
        return read_hardware(name), read_assumptions()


def place_on(pair: PairOnHardware, tree: TreeSettings) -> PlacedWeights:
    """Return the placement within the memory; raises EdgespecError."""
    return place_weights(pair.weights, tree, pair.run_config, pair.memory)


def locked_bytes_here(assumptions: Assumptions) -> float:
    """Return what can be locked on this machine beside staging buffers: under WSL little, elsewhere what is planned."""
    if not locks_little():
        return math.inf
    return max(0.0, assumptions.wsl_locked_bytes - NUM_STAGING_BUFFERS * STAGING_BYTES)


def memory_there(hardware: Hardware, assumptions: Assumptions, limits: MemoryLimits) -> Memory:
    """Return what hardware that is not here has of memory, within the limits."""
    there_bytes = assumptions.usable_bytes(hardware)
    if hardware.device == "cpu":
        return memory_within(limits, host_bytes=there_bytes - MARGIN_BYTES, free_device_bytes=None)
    return memory_within(limits, host_bytes=assumptions.host_memory_bytes, free_device_bytes=there_bytes)


def estimate_plain(pair: PairOnHardware) -> SpeedEstimate:
    """Estimate decoding without a draft, one token a pass."""
    return _estimate(pair, place_on(pair, TreeSettings(policy="none")), nodes=0, depth=0, tokens=1.0)


def estimate_best(
    pair: PairOnHardware,
    tree: TreeSettings,
    acceptance: Sequence[float],
    *,
    size: int | None,
    most_nodes: int = SIZES[-1],
) -> SpeedEstimate:
    """Estimate the tree of most tokens a second within the settings' limits; `size` fixes its budget.

    Without it no tree has more than `most_nodes`.

    Raises EdgespecError when not even the smallest tree fits.
    """
    preset = preset_shape(tree)
    if preset is not None:
        tokens = expected_tokens(preset, acceptance)
        return _estimate(pair, place_on(pair, tree), nodes=preset.num_nodes - 1, depth=preset.depth, tokens=tokens)
    sizes = [one for one in SIZES if one <= most_nodes] if size is None else [size]
    if pair.weights.draft is not None:
        tree = tree.up_to(calls_of(pair.weights.draft.model.parts).deepest)
    with torch_threads(1):  # several would wait for each other at each of many small operations
        table = sequoia_table(acceptance, size=max(sizes), depth=tree.depth, max_children=tree.width)
    best: tuple[float, PlacedWeights, int, int, float] | None = None
    for nodes in sizes:
        try:
            weights = place_on(pair, replace(tree, size=nodes))
        except EdgespecError:
            if best is None:
                raise
            break  # nor do larger ones fit
        load, rates = load_there(pair, weights), rates_of(pair, pair.assumptions.likely)
        for depth in range(1, min(tree.depth, nodes) + 1):
            tokens = table.expected_tokens(nodes, depth)
            found = step_seconds(load, rates, pair.run_config.num_texts, nodes=nodes, depth=depth, tokens=tokens)
            if best is None or found.tokens_per_s > best[0]:
                best = (found.tokens_per_s, weights, nodes, depth, tokens)
    assert best is not None
    _, weights, nodes, depth, tokens = best
    return _estimate(pair, weights, nodes=nodes, depth=depth, tokens=tokens)


def expected_tokens(shape: TreeShape, acceptance: Sequence[float]) -> float:
    """Return the tokens a pass: 1 + the sum over nodes of the product of acceptance along the way."""
    chances = [1.0]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        chances.append(chances[parent] * (acceptance[rank] if rank < len(acceptance) else 0.0))
    return sum(chances)


def _estimate(pair: PairOnHardware, weights: PlacedWeights, *, nodes: int, depth: int, tokens: float) -> SpeedEstimate:
    load = load_there(pair, weights)
    step = functools.partial(
        step_seconds, load, num_texts=pair.run_config.num_texts, nodes=nodes, depth=depth, tokens=tokens
    )
    cases = {case: step(rates_of(pair, getattr(pair.assumptions, case))) for case in ("slow", "likely", "fast")}
    return SpeedEstimate(weights=weights, nodes=nodes, depth=depth, target=load.target, **cases)


def rates_of(pair: PairOnHardware, achieved: Achieved) -> Rates:
    """Return the hardware's rates in the pair's number format."""
    return achieved_rates(pair.hardware, achieved, pair.assumptions, half=pair.run_config.dtype.itemsize == 2)


def load_there(pair: PairOnHardware, weights: PlacedWeights) -> PairLoad:
    """Return what passes of both models move and compute there."""
    growth = None if weights.draft is None else pair.growth
    return pair_load(weights, pair.run_config, draws=pair.draws, locked_bytes=pair.locked_bytes, growth=growth)


def packed_kernels_tokens_per_s(pair: PairOnHardware, estimate: SpeedEstimate) -> float | None:
    """Return the likely tokens a second of all texts with kernels that multiply packed experts where they lie.

    edgespec unpacks experts that it has no kernel for, by torch, which takes longer than reading them; llama.cpp has
    such kernels. None where no packed experts without a kernel lie beside the device.
    """
    step, experts = estimate.likely, estimate.target.experts
    if step.experts is None or experts is None or pair.run_config.device.type == "cpu":
        return None
    if not experts.unpacked_bytes or experts.host_multiplies or experts.device_kept >= experts.num_experts:
        return None
    rates = replace(rates_of(pair, pair.assumptions.likely), host_unpack_weights_per_s=math.inf)
    found = expert_seconds(experts, rates, rows=step.num_texts * (1 + estimate.nodes), num_texts=step.num_texts)
    return step.num_texts * step.tokens / (step.step_s - step.experts.seconds + found.seconds)
