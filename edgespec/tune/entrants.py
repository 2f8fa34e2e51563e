"""Every lossless policy at one budget: what the tuner chooses among."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.tree.settings import TreeSettings

CHAIN_TOKENS = 16  # longer ones never paid
# Presets by their number of nodes: wide at the root, as their papers use them
SPECINFER = {15: (2, 1, 1, 1, 1, 1, 1), 52: (4, 2, 1, 1, 1, 1, 1), 200: (8, 2, 2, 1, 1, 1, 1)}
MCSD = {14: (2, 2, 1, 1), 60: (4, 2, 2, 1, 1), 232: (8, 4, 2, 1, 1)}
DRAWS = ("sampled", "chosen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy's settings at the largest budget."""

    settings: TreeSettings
    draw: str  # sampled | chosen
    is_budgeted: bool = True
    takes_threshold: bool = False

    @property
    def is_nested(self) -> bool:
        """Whether its best nodes are the tree of a smaller size: a chain has only a length, a preset its shape."""
        return self.is_budgeted and self.settings.draft_tokens is None

    @property
    def key(self) -> tuple[str, str]:
        """What tells contenders apart."""
        return self.settings.policy, self.draw


def contenders(*, size: int, depth: int) -> list[Contender]:
    """All of them, within `size` nodes and `depth` layers."""
    found = [
        Contender(
            settings=TreeSettings(policy="adaptive", draw=draw, size=size, depth=depth), draw=draw, takes_threshold=True
        )
        for draw in DRAWS
    ]
    found.append(Contender(settings=TreeSettings(policy="dyspec", size=size, depth=depth), draw="sampled"))
    found += [
        Contender(settings=TreeSettings(policy=policy, size=size, depth=depth), draw="chosen")
        for policy in ("opt-tree", "eagle2", "c2t")
    ]
    for draw in DRAWS:
        found.append(Contender(settings=TreeSettings(policy="sequoia", draw=draw, size=size, depth=depth), draw=draw))
        found.append(
            Contender(settings=TreeSettings(policy="chain", draw=draw, draft_tokens=min(CHAIN_TOKENS, size)), draw=draw)
        )
        for policy, presets in (("specinfer", SPECINFER), ("mcsd", MCSD)):
            fitting = [branching for nodes, branching in presets.items() if nodes <= size]
            if fitting:
                settings = TreeSettings(policy=policy, draw=draw, branching=fitting[-1])
                found.append(Contender(settings=settings, draw=draw, is_budgeted=False))
    return found


def narrowed(contender: Contender, *, size: int) -> Contender:
    """The contender with trees of at most so many nodes."""
    if not contender.is_nested:
        return contender
    settings = contender.settings
    size = min(size, settings.size)
    return replace(contender, settings=replace(settings, size=size, depth=min(size, settings.depth)))


def rank_values(model: AcceptanceModel, *, temperature: float, draw: str) -> list[float]:
    """Acceptance by rank of a draw, made to fall: what orders the nodes of a Sequoia tree."""
    rates = model.rank_acceptance(temperature, "top_k" if draw == "chosen" else "without_replacement")
    return [min(rates[: rank + 1]) for rank in range(len(rates))]
