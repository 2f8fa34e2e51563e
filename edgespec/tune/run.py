"""What the stages of a profiling run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.config import SamplingSettings
from edgespec.engine import Engine
from edgespec.tune.race import Rule

Report = Callable[[str, float], None]  # stage, the share of it that is done

DEPTH = 24  # of the deepest trees that are tried
RULE = Rule(confidence=0.95, least_gain=0.02)
PASSES = 1200  # that there is time for where they are slow: fewer choose by luck


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long all measuring may take, and what decides.

    Timing, learning, comparing and trying each get as much of the time that is left as any stage behind them.
    """

    budget_s: float
    most_s: float  # where passes are slow
    steps_per_prompt: int  # that trees are compared at before the next prompt's turn
    fits_acceptance: bool  # a model of the pair's own; else the given one, shifted
    rule: Rule = RULE

    def allowed_s(self, pass_s: float) -> float:
        """All time there is, for a target whose plain pass takes so long."""
        return max(self.budget_s, min(PASSES * pass_s, self.most_s))


QUICK = Effort(budget_s=60, most_s=240, steps_per_prompt=1, fits_acceptance=False)
FULL = Effort(budget_s=300, most_s=1200, steps_per_prompt=6, fits_acceptance=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A loaded pair, the texts to try it on, and how long that may take."""

    engine: Engine  # its tree settings say how large a tree memory was planned for
    prompts: Sequence[list[int]]
    temperatures: Sequence[float]
    effort: Effort
    seed: int = 0
    report: Report = lambda _stage, _share: None
    warn: Callable[[str], None] = lambda _text: None

    def sampling(self, temperature: float) -> SamplingSettings:
        """At this temperature, truncated as the target's own generation config asks for; without its penalties."""
        return replace(self.engine.pair.default_sampling().unpenalised(), temperature=temperature)

    @property
    def max_nodes(self) -> int:
        """Of a tree that memory was planned for."""
        return self.engine.tree.num_nodes
