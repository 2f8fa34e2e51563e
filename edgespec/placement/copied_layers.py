"""The layers of a draft that is a low-bit copy of its target: the target's own where they stay, else packed ones.

A layer that stays in the target's plan takes no copy. So it costs what it takes beyond its copy, and the plan weighs
the one against the other (`offload/placement.py`). Targets that are packed themselves share no layers, nor do those
whose experts come on demand: there all layers are copied.
"""

from dataclasses import replace

import torch

from edgespec.draft.own_parts import is_copy
from edgespec.pair.folder import ModelFolder
from edgespec.placement.memory import placed_bytes
from edgespec.placement.weights import Weights
from edgespec.tree.settings import TreeSettings
from offload.placement import COPIES, GIB, Placement
from offload.shared_layers import without_layers

DEPTH = 48  # layers of trees that nobody has limited: a copy guesses many tokens in a row, and SubSpec's are as deep
ALL_SHARED = (
    "all of the target's layers stay in memory, so that its copy has nothing to replace: a draft's token costs what a "
    "pass costs; use a small draft or `policy=none`"
)


def deep_trees(tree: TreeSettings, draft: ModelFolder | None) -> TreeSettings:
    """Return trees whose depth nobody has named: deeper ones for a copy."""
    is_deeper = draft is not None and is_copy(draft.parts) and tree.uses("depth")
    return replace(tree, depth=DEPTH) if is_deeper else tree


def copy_bytes(target: Weights, draft: Weights | None, device: torch.device) -> list[int] | None:
    """Return the bytes of each layer's copy, which takes the place of a layer that streams; None where none does so."""
    if draft is None or not is_copy(draft.model.parts) or target.skeleton.packed:
        return None
    return [placed_bytes(record, device=device) for record in draft.skeleton.records]


def shared_layers(target: Weights, draft: Weights | None, placement: Placement) -> frozenset[int]:
    """Return the layers of the draft that are the target's own."""
    is_shared = draft is not None and is_copy(draft.model.parts) and not target.skeleton.packed
    return placement.resident_layers if is_shared and placement.experts is None else frozenset()


def as_computed(target: Weights, draft: Weights | None, placement: Placement) -> Weights | None:
    """Return the draft's weights as its passes read them: with the target's records where layers are shared."""
    shared = shared_layers(target, draft, placement)
    if draft is None or not shared:
        return draft
    kept = without_layers(draft.skeleton, shared)
    records = [*kept.records, *(record for record in target.skeleton.records if record.index in shared)]
    return replace(draft, skeleton=replace(kept, records=tuple(sorted(records, key=lambda record: record.index))))


def notes_of_copy(target: Weights, draft: Weights | None, placement: Placement) -> tuple[str, ...]:
    """Return what is to be said of a copy: which layers it has of its own, and that it cannot pay where it has none."""
    if draft is None or not is_copy(draft.model.parts):
        return ()
    num_own = placement.num_layers - len(shared_layers(target, draft, placement))
    if not num_own:
        return (ALL_SHARED,)
    layers = f"{num_own} of {placement.num_layers} layers in {draft.formats}"
    copied_bytes = placement.device_bytes[COPIES]
    return (
        f"the draft is the target's own copy: {layers}, {copied_bytes / GIB:.3f} GiB; all else is the target's own",
    )
