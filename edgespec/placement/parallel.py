"""How many texts under way pay: a text's cache is weighed against a layer that stays resident."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgespec.errors import EdgespecError
from edgespec.placement.run_config import RunConfig
from offload.placement import Placement
from profiles.schema import Plan, Profile, TemperaturePlan

MAX_TEXTS = 16  # growth costs each text a little, and little is gained by more
SPREAD = 1.25  # of the texts under way over the mean of all
COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The texts that a run has, from which follows how many of them share each pass."""

    num_waiting: int
    mean_tokens: float  # of a text with its answers
    num_texts: int | None = None  # that share a pass, at most; None: as many as pay


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShares:
    """What the parts of a step take, where a pass that streams all layers takes 1: a guess, unless it was measured."""

    resident: float = 0.15  # of a pass whose layers are all resident
    text: float = 0.02  # of each text, with its tree
    # Texts that share passes have smaller trees: the tokens of each over those of one alone, at so many texts
    tokens_left: float = 1.0
    at_texts: int = 2

    def step(self, placement: Placement, num_texts: int) -> float:
        """Return the seconds of a step, where one over the weights, all streamed, takes 1."""
        streamed = 1 - placement.resident_share
        keys = streamed * placement.keys_bytes / placement.streamed_bytes if placement.keys_bytes else 0.0
        return streamed + keys + self.resident * (1 - streamed) + self.text * num_texts

    def tokens(self, num_texts: int) -> float:
        """Return the tokens that a step yields all texts, where it yields 1 to one alone."""
        return num_texts * math.pow(self.tokens_left, math.log(num_texts) / math.log(self.at_texts))


def pass_shares(profile: Profile, plan: TemperaturePlan) -> PassShares:
    """Return what a pass's parts take, as they were measured, next to one that streams all layers."""
    most = max((plan.best, *plan.by_texts), key=lambda found: found.num_texts)
    if most.num_texts == 1:
        return PassShares()
    resident = profile.pair.resident_layers / profile.pair.num_layers
    all_streamed_s = plan.best.plain_step_s / ((1 - resident) + PassShares().resident * resident)
    (tokens, step_s), (tokens_alone, step_alone_s) = _step(most), _step(plan.best)
    text_s = max(0.0, step_s - step_alone_s) / (most.num_texts - 1)
    return PassShares(text=text_s / all_streamed_s, tokens_left=tokens / tokens_alone, at_texts=most.num_texts)


def _step(plan: Plan) -> tuple[float, float]:
    """Return the tokens of each text and the seconds of a step, decoded in the faster way."""
    return (plan.tokens, plan.step_s) if plan.pays else (1.0, plan.plain_step_s)


def with_workload(
    run_config: RunConfig, workload: Workload, *, place: Callable[[RunConfig], Placement], shares: PassShares
) -> RunConfig:
    """Return the run, which is planned for one text, with as many of the workload's texts under way as it says.

    Where it does not, they are as many as make most tokens a second of all; `place` returns where the layers live
    beside them. Where nothing fits, one text is left to say so.
    """
    num_waiting, num_texts = workload.num_waiting, workload.num_texts
    if num_waiting <= 1 or num_texts == 1:
        return run_config
    if num_texts is not None:
        return with_texts(run_config, min(num_texts, num_waiting), workload.mean_tokens)
    best, most_per_s = run_config, 0.0
    for count in sorted({*COUNTS, min(num_waiting, MAX_TEXTS)}):
        if count > num_waiting:
            break
        own = with_texts(run_config, count, workload.mean_tokens)
        try:
            placement = place(own)
        except EdgespecError:
            break
        per_s = shares.tokens(count) / shares.step(placement, count)
        if per_s > most_per_s:
            best, most_per_s = own, per_s
    return best


def with_texts(run_config: RunConfig, count: int, mean_tokens: float) -> RunConfig:
    """Return the run with so many texts under way, and memory for a few that are longer than the mean."""
    tokens = run_config.context_tokens + int((count - 1) * min(run_config.context_tokens, SPREAD * mean_tokens))
    return replace(run_config, num_texts=count, cache_tokens=tokens)
