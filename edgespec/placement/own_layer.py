"""Whether a target's own layer drafts where nobody has named a draft: memory must allow it, and it must be able to pay.

What it costs is reckoned in the bytes of a pass, with it and one node more, and without, before anything is loaded.
What it brings is not known yet. So it is taken where even few accepted tokens pay for it, and the steps of the run
decide from there on (`tuning/`); what `edgespec profile` has measured counts above both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.errors import EdgespecError
from edgespec.placement.place import PlacedWeights
from edgespec.tree.settings import TreeSettings
from profiles.hardware import read_assumptions

# Tokens a pass, if half of the layer's first guesses are right. Of published layers four of five are: DeepSeek-V3,
# section 5.4.3.
EXPECTED_TOKENS = 1.5
MOVED = 10.0  # times as long as memory is read take bytes that come over a link, or from a disk, at the least
_NAMED = "the target's own multi-token-prediction layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayer:
    """Whether a target's own layer drafts, and why, in a line for people."""

    drafts: bool
    why: str


def weigh_own_layer(tree: TreeSettings, place: Callable[[TreeSettings], PlacedWeights]) -> OwnLayer:
    """Return whether the layer drafts these trees; `place` places it beside the target, which is alone without trees.

    Raises EdgespecError where the target alone does not fit.
    """
    alone = place(tree.plain())
    try:
        placed = place(tree)
    except EdgespecError as error:
        return OwnLayer(drafts=False, why=f"{_NAMED} does not draft: {error.what.removesuffix('.')}")
    assert placed.draft is not None
    cost = (_pass_bytes(placed, rows=2) + placed.draft.token_bytes) / _pass_bytes(alone, rows=1)
    reckoned = (
        f"a pass is reckoned to take {cost:.2g} times as long, by its bytes, and to yield {EXPECTED_TOKENS:g} tokens"
    )
    if cost >= EXPECTED_TOKENS:
        return OwnLayer(drafts=False, why=f"{_NAMED} does not draft: {reckoned}; `draft=mtp` takes it")
    return OwnLayer(drafts=True, why=f"{_NAMED} drafts: {reckoned}; `draft=none` leaves it out")


def _pass_bytes(placed: PlacedWeights, *, rows: int) -> float:
    """Return the bytes that a pass over so many rows of a text reads; those that move first count for more."""
    placement = placed.placement
    experts, moved = placement.experts, float(placement.streamed_bytes)
    times = rows ** read_assumptions().likely.expert_spread if placed.target.expert_share < 1 else 1.0
    if experts is not None:  # of which only those that rows ask for move, where they are not kept
        asked = min(1.0, times * placed.target.expert_share) * experts.num_left
        moved = placement.every_pass_bytes + asked * experts.expert_bytes
    return MOVED * moved + placed.target.pass_bytes(times)
