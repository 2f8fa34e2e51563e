"""Whether a target's own layer drafts where nobody has named a draft: memory must allow it, and it must be able to pay.

What it costs is reckoned in the bytes of a pass, with it and without, before anything is loaded. What it brings is not
known yet. So it is taken where even few accepted tokens pay for it, and the steps of the run decide from there on
(`tuning/`); what `edgespec profile` has measured counts above both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.errors import EdgespecError
from edgespec.placement.place import PlacedWeights
from edgespec.tree.settings import TreeSettings

# Tokens a pass, if half of the layer's first guesses are right. Of published layers four of five are: DeepSeek-V3,
# section 5.4.3.
EXPECTED_TOKENS = 1.5
GIB = 1 << 30
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
    moved, moved_alone = placed.placement.streamed_bytes, alone.placement.streamed_bytes
    if moved and not moved_alone:
        why = f"beside it not all of the target stays in memory: {moved / GIB:.3f} GiB would move in each pass"
        return OwnLayer(drafts=False, why=f"{_NAMED} does not draft: {why}; `draft=mtp` takes it")
    # A pass takes what moves, or what its own row reads, whichever is more; the draft reads its layer beside that.
    token_bytes = alone.target.token_bytes
    cost = (max(moved, token_bytes) + placed.draft.token_bytes) / max(moved_alone, token_bytes)
    bytes_each = f"{cost:.2f} times the bytes of a plain one"
    if cost >= EXPECTED_TOKENS:
        why = f"a pass would take {bytes_each}, and {EXPECTED_TOKENS:g} tokens are expected of it; `draft=mtp` takes it"
        return OwnLayer(drafts=False, why=f"{_NAMED} does not draft: {why}")
    return OwnLayer(
        drafts=True,
        why=f"{_NAMED} drafts: a pass takes {bytes_each}, and {EXPECTED_TOKENS:g} tokens are expected of it; "
        "`draft=none` leaves it out",
    )
