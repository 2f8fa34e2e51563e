"""The contents of a profile: a machine, a pair on it, what was measured, and the plans that follow.

Fields are checked when a file is read (`profiles.files`); the bounds refuse what is absurd. Counts are
nodes below the root, or rows of a draft call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

SCHEMA = "edgespec.profile/4"
WITH_LAYERS = "with their layers"  # experts of a mixture; other models have none

Text = Annotated[str, Field(max_length=300)]
Name = Annotated[str, Field(max_length=200, pattern=r"^[a-z0-9][a-z0-9.-]*$")]  # a file is named so: no folders in it
Count = Annotated[int, Field(strict=True, ge=0, le=10**15)]
Nodes = Annotated[int, Field(strict=True, ge=0, le=768)]
Scheduler = Annotated[int, Field(strict=True, ge=1, le=1024)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=86_400, allow_inf_nan=False)]
MaybeZero = Annotated[float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, le=1e15, allow_inf_nan=False)]
Tokens = Annotated[float, Field(strict=True, ge=1, le=769, allow_inf_nan=False)]
MeanNodes = Annotated[float, Field(strict=True, ge=0, le=768, allow_inf_nan=False)]
Temperature = Annotated[float, Field(strict=True, ge=0, lt=100, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The machine and the software that a measurement was made with."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    system: Text
    processor: Text
    num_cores: Count
    memory_bytes: Count
    accelerator: Text | None = None
    accelerator_bytes: Count | None = None
    driver: Text | None = None
    link: Text | None = None  # as "PCIe 4.0 x16"
    python: Text
    versions: dict[str, Text]  # package -> version

    @property
    def device_name(self) -> str:
        """The name of what computes: the accelerator, or the processor."""
        return self.accelerator or self.processor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """The pair and where its layers lie: times depend on this, beside the machine."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: Text  # the folder's name
    target_fingerprint: Text  # of config, headers and weights
    draft: Text
    draft_fingerprint: Text
    quant: Text
    draft_quant: Text
    dtype: Text
    device: Text
    threads: Count | None = None  # of the processor, where that computes
    num_layers: Count
    resident_layers: Count
    ram_layers: Count
    disk_layers: Count
    experts: Text = WITH_LAYERS  # how a mixture's move


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Rates in bytes a second; None for what the machine or the placement does not have."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    disk_sequential_per_s: Rate | None = None
    disk_streamed_per_s: Rate | None = None  # streamed bytes of a plain pass over its seconds
    copy_pinned_per_s: Rate | None = None
    copy_pageable_per_s: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The seconds of one task at one count, over its repeats."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    count: Nodes  # nodes or rows
    median_s: Seconds
    spread_s: MaybeZero  # between the quartiles
    repeats: Count


def _ascending(timings: tuple[Timing, ...]) -> tuple[Timing, ...]:
    """Check that the counts ascend, so that a curve can go through them."""
    if any(left.count >= right.count for left, right in itertools.pairwise(timings)):
        raise ValueError("counts do not ascend")
    return timings


Timings = Annotated[tuple[Timing, ...], Field(min_length=1), AfterValidator(_ascending)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherTiming:
    """What steps of several texts take beside growth, over the nodes of all their trees."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    num_texts: Scheduler
    steps: Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthTiming:
    """The fitted cost of a policy's growth (`profiles.cost.GrowthCost`)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    policy: Text
    draw: Text
    base_s: MaybeZero
    layer_s: MaybeZero
    node_s: MaybeZero
    rows_per_inner: Annotated[float, Field(strict=True, ge=0, le=1e4, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Predicted against observed acceptance, for predictions in one tenth of [0, 1]."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    predicted: Share
    observed: Share
    weight: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How far the acceptance model's predictions hold on this pair."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    calibration_error: Share
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAcceptance:
    """For each rank, the chance that its child is the one accepted, given that its parent is."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    draw: Text
    temperature: Temperature
    rates: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a step and their predicted speed, with the measured speed where they were tried."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    policy: Text
    draw: Text | None = None
    size: Nodes
    depth: Nodes
    threshold: Share = 0.0
    branching: tuple[Nodes, ...] = ()
    tokens: Tokens  # a pass
    promised: Tokens | None = None  # that growth itself expected of its trees, where its scores are tokens
    nodes: MeanNodes  # a pass, on average
    step_s: Seconds
    measured_step_s: Seconds | None = None
    num_texts: Scheduler = 1  # that share each pass

    @property
    def tokens_per_s(self) -> float:
        """The predicted tokens a second of all texts; where the step's seconds were measured, those are used."""
        return self.num_texts * self.tokens / (self.measured_step_s or self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperaturePlan:
    """The plan for one temperature, and the plans that it was chosen against."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    temperature: Temperature
    best: Plan
    plain: Plan
    runner_up: Plan | None = None
    why: Text
    by_size: tuple[Plan, ...] = ()
    by_texts: tuple[Plan, ...] = ()  # the best of the same policy for more texts under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All that was measured of one pair on one machine, and the plans for it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    schema: Text
    created: Text
    edgespec: Text  # version
    name: Name
    context_tokens: Count  # of the texts that passes were timed at
    num_texts: Count  # that trees were grown at
    machine: MachineFacts
    pair: PairFacts
    bandwidths: Bandwidths
    verify: Timings
    draft: Timings
    together: tuple[TogetherTiming, ...]
    rest_s: Seconds  # of a step, beside growth and pass
    plain_step_s: Seconds  # of a step without a tree
    prefetch_s: MaybeZero
    growth: tuple[GrowthTiming, ...]
    reliability: Reliability
    ranks: tuple[RankAcceptance, ...]
    plans: Annotated[tuple[TemperaturePlan, ...], Field(min_length=1)]
    acceptance: dict[str, Any]  # the pair's acceptance model, as its own room writes it
    expert_use: tuple[tuple[Share, ...], ...] = ()  # [layers][experts] of a mixture: of passes, those that asked for it
