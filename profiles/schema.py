"""The contents of a profile: a machine, a pair on it, and what an engine learned there from its own steps.

Fields are checked when a file is read (`profiles.files`); the bounds refuse what is absurd.
"""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

SCHEMA = "edgespec.profile/5"
WITH_LAYERS = "with their layers"  # experts of a mixture; other models have none

Text = Annotated[str, Field(max_length=300)]
Name = Annotated[str, Field(max_length=200, pattern=r"^[a-z0-9][a-z0-9.-]*$")]  # a file is named so: no folders in it
Count = Annotated[int, Field(strict=True, ge=0, le=10**15)]
NumTexts = Annotated[int, Field(strict=True, ge=1, le=1024)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=86_400, allow_inf_nan=False)]
MaybeZero = Annotated[float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, le=1e15, allow_inf_nan=False)]
Tokens = Annotated[float, Field(strict=True, ge=1, le=769, allow_inf_nan=False)]
Rows = Annotated[float, Field(strict=True, ge=1, le=10**6, allow_inf_nan=False)]
Sum = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
MeanNodes = Annotated[float, Field(strict=True, ge=0, le=768, allow_inf_nan=False)]
Temperature = Annotated[float, Field(strict=True, ge=0, lt=100, allow_inf_nan=False)]


class _Record:
    """A part of the file, which has no other keys than its fields."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts(_Record):
    """The machine and the software that a measurement was made with."""

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
class PairFacts(_Record):
    """The pair and where its layers lie: times depend on this, beside the machine."""

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
class Bandwidths(_Record):
    """Rates in bytes a second; None for what the machine or the placement does not have."""

    disk_sequential_per_s: Rate | None = None
    disk_streamed_per_s: Rate | None = None  # streamed bytes of a plain pass over its seconds
    copy_pinned_per_s: Rate | None = None
    copy_pageable_per_s: Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPoint(_Record):
    """The seconds of a pass over some rows."""

    rows: Rows  # of all trees, the roots among them
    seconds: Seconds


def _ascending(points: tuple[PassPoint, ...]) -> tuple[PassPoint, ...]:
    """Check that the rows ascend, so that a curve can go through them."""
    if any(left.rows >= right.rows for left, right in itertools.pairwise(points)):
        raise ValueError("rows do not ascend")
    return points


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCurve(_Record):
    """The seconds of a pass over its rows, where so many texts share it."""

    num_texts: NumTexts
    points: Annotated[tuple[PassPoint, ...], Field(min_length=1), AfterValidator(_ascending)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthSeconds(_Record):
    """The seconds of growing trees: of each tree, each layer and each node.

    A draft call belongs to each layer, or to the tree.
    """

    tree_s: MaybeZero
    layer_s: MaybeZero
    node_s: MaybeZero


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTokens(_Record):
    """What the mean of trees of at most so many nodes yields."""

    size: Annotated[int, Field(strict=True, ge=1, le=768)]
    tokens: Tokens  # a pass
    nodes: MeanNodes
    layers: MeanNodes
    weight: Sum  # trees that the means are of, as far as they are remembered


SizesTokens = Annotated[tuple[SizeTokens, ...], Field(max_length=100)]
ScoreSums = Annotated[tuple[Sum, ...], Field(min_length=10, max_length=10)]  # by class of score


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_Record):
    """What was learned of texts of one temperature, so many of which share each pass; and the trees that follow."""

    num_texts: NumTexts = 1
    pays: Annotated[bool, Field(strict=True)]  # whether such trees are faster than plain decoding
    size: Annotated[int, Field(strict=True, ge=1, le=768)]
    threshold: Share
    stop_gain: MaybeZero
    tokens: Tokens  # of a text, a pass
    nodes: MeanNodes  # of a text, a pass
    step_s: Seconds
    plain_step_s: Seconds
    num_trees: Count  # that were seen
    share_full: Share  # of them, those as large as they might have been
    by_size: SizesTokens
    promised: ScoreSums  # of tokens, by the scores of verified nodes
    kept: ScoreSums  # of these, accepted

    @property
    def policy(self) -> str:
        """The policy of the trees; none where plain decoding is faster."""
        return "adaptive" if self.pays else "none"

    @property
    def trees_per_s(self) -> float:
        """The tokens a second of all texts through trees."""
        return self.num_texts * self.tokens / self.step_s

    @property
    def plain_per_s(self) -> float:
        """The tokens a second of all texts by plain decoding."""
        return self.num_texts / self.plain_step_s

    @property
    def tokens_per_s(self) -> float:
        """The tokens a second of the faster way."""
        return self.trees_per_s if self.pays else self.plain_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperaturePlan(_Record):
    """The plans for one temperature."""

    temperature: Temperature
    best: Plan  # of one text
    by_texts: tuple[Plan, ...] = ()  # of more texts under way

    @property
    def why(self) -> str:
        """The decision for one text in a sentence."""
        plan = self.best
        if not plan.pays:
            return (
                f"speculation is slower than plain decoding here: trees of {plan.size} nodes would give "
                f"{plan.trees_per_s:.3g} tokens/s, plain {plan.plain_per_s:.3g}; it is switched off"
            )
        gain = plan.trees_per_s / plan.plain_per_s
        step_ms = 1000 * plan.step_s
        return f"{plan.tokens:.3g} tokens a pass in {step_ms:.3g} ms, {gain:.3g} times plain decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(_Record):
    """All that was learned of one pair on one machine."""

    schema: Text
    created: Text
    edgespec: Text  # version
    name: Name
    context_tokens: Count  # of the longest prompt
    num_prompts: Count
    machine: MachineFacts
    pair: PairFacts
    bandwidths: Bandwidths
    passes: Annotated[tuple[PassCurve, ...], Field(min_length=1)]
    growth: GrowthSeconds
    plans: Annotated[tuple[TemperaturePlan, ...], Field(min_length=1)]
    acceptance: dict[str, Any] | None = None  # the pair's own model, where one was fitted
    calibration_error: Share | None = None  # of that model, on prompts that were held out
    expert_use: tuple[tuple[Share, ...], ...] = ()  # [layers][experts] of a mixture: of passes, those that asked for it
