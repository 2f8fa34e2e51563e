"""What the stages of a profiling run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.config import SamplingSettings
from edgespec.engine import Engine

Report = Callable[[str, float], None]  # stage, the share of it that is done

DEPTH = 24  # of the deepest trees that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long each part may take, and how much is tried."""

    timing_s: float  # of the verify curve; drafting and growth get about as much
    sampling_s: float  # of the trees, all temperatures together
    steps_per_prompt: int
    trial_s: float  # of the candidates' real steps, all temperatures together
    fits_acceptance: bool  # a model of the pair's own; else the given one, shifted


QUICK = Effort(timing_s=6, sampling_s=36, steps_per_prompt=2, trial_s=15, fits_acceptance=False)
FULL = Effort(timing_s=30, sampling_s=180, steps_per_prompt=6, trial_s=90, fits_acceptance=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A loaded pair, the texts to try it on, and how long that may take."""

    engine: Engine  # its tree settings say how large a tree memory was planned for
    prompts: Sequence[list[int]]
    temperatures: Sequence[float]
    effort: Effort
    seed: int = 0
    report: Report = lambda _stage, _share: None

    def sampling(self, temperature: float) -> SamplingSettings:
        """At this temperature, truncated as the target's own generation config asks for."""
        return replace(self.engine.pair.default_sampling(), temperature=temperature)

    @property
    def max_nodes(self) -> int:
        """Of a tree that memory was planned for."""
        return self.engine.tree.num_nodes
