"""Every lossless policy at one budget: what the tuner chooses among."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.tree.policies import DRAWS, POLICIES, Draw, Policy
from edgespec.tree.settings import TreeSettings

CHAIN_TOKENS = 16  # longer ones never paid
GUIDE = "adaptive"  # the policy that others have to beat: trees that tune themselves are its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy's settings at the largest budget."""

    settings: TreeSettings
    draw: Draw

    @property
    def policy(self) -> Policy:
        """What is true of it at any budget."""
        return POLICIES[self.settings.policy]

    @property
    def is_budgeted(self) -> bool:
        """Whether there are smaller ones: a preset has its shape."""
        return self.policy.budget is not None

    @property
    def is_nested(self) -> bool:
        """Whether its best nodes are the tree of a smaller size: a chain has only a length, a preset its shape."""
        return self.policy.budget == "size"

    @property
    def key(self) -> tuple[str, Draw]:
        """What tells contenders apart."""
        return self.settings.policy, self.draw


def contenders(*, size: int, depth: int) -> list[Contender]:
    """All of them, within `size` nodes and `depth` layers; the first is the guide of the others."""
    dynamic = [policy for policy in POLICIES.values() if policy.kind == "dynamic"]
    static = [policy for policy in POLICIES.values() if policy.kind == "static"]
    static.sort(key=lambda policy: policy.budget is None)  # presets last: records and ties depend on the order
    ordered = [(policy, draw) for policy in dynamic for draw in policy.draws]
    ordered += [(policy, draw) for draw in DRAWS for policy in static if draw in policy.draws]
    found = ((_largest(policy, draw, size=size, depth=depth), draw) for policy, draw in ordered)
    return [Contender(settings=settings, draw=draw) for settings, draw in found if settings is not None]


def _largest(policy: Policy, draw: Draw, *, size: int, depth: int) -> TreeSettings | None:
    """The policy's largest tree within the limits; None where it has none."""
    own: dict[str, Any] = {"policy": policy.name, "draw": draw}
    if policy.budget == "size":
        return TreeSettings(**own, size=size, depth=depth)
    if policy.budget == "draft_tokens":
        return TreeSettings(**own, draft_tokens=min(CHAIN_TOKENS, size))
    fitting = [branching for nodes, branching in policy.presets.items() if nodes <= size]
    return TreeSettings(**own, branching=fitting[-1]) if fitting else None


def narrowed(contender: Contender, *, size: int) -> Contender:
    """The contender with trees of at most so many nodes."""
    if not contender.is_nested:
        return contender
    settings = contender.settings
    size = min(size, settings.size)
    return replace(contender, settings=replace(settings, size=size, depth=min(size, settings.depth)))


def rank_values(model: AcceptanceModel, *, temperature: float, draw: Draw) -> list[float]:
    """Acceptance by rank of a draw, made to fall: what orders the nodes of a Sequoia tree."""
    rates = model.rank_acceptance(temperature, draw)
    return [min(rates[: rank + 1]) for rank in range(len(rates))]
