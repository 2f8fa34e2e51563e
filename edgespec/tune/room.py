"""How large a tree can be measured in the memory there is."""

from __future__ import annotations

import torch

from edgespec.config import MAX_TREE_SIZE, MemoryLimits
from edgespec.errors import EdgespecError
from edgespec.model.target import offload_errors
from edgespec.pair.pair import ModelPair
from edgespec.placement.plan import plan_pair
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings
from edgespec.tune.run import DEPTH

SMALLEST = 16
LEAST_SHARE = 0.9  # of the layers that a small tree leaves resident: more must not be given up for measuring


def measuring_tree(
    pair: ModelPair,
    *,
    limits: MemoryLimits,
    device: torch.device,
    dtype: torch.dtype,
    quant: str | None,
    draft_quant: str | None,
    context_tokens: int,
    prompt_tokens: int,
) -> TreeSettings:
    """The largest tree that leaves the layers where they would be in use, of the policy that drafts most.

    Raises EdgespecError where not even a small one fits.
    """
    smallest = widest_tree(SMALLEST)
    least = 0.0
    for size in (SMALLEST, *(MAX_TREE_SIZE // part for part in (1, 2, 3, 6, 12, 24))):
        try:
            with offload_errors():
                resident = plan_pair(
                    pair.target,
                    pair.draft,
                    tree=widest_tree(size),
                    limits=limits,
                    device=device,
                    dtype=dtype,
                    quant=quant,
                    draft_quant=draft_quant,
                    context_tokens=context_tokens,
                    prompt_tokens=prompt_tokens,
                ).placement.num_resident
        except EdgespecError:
            if size == SMALLEST:
                raise
            continue
        if size == SMALLEST:
            least = LEAST_SHARE * resident
        elif resident >= least:
            return widest_tree(size)
    return smallest


def widest_tree(size: int) -> TreeSettings:
    """Trees of `size` nodes of the policy that drafts most."""
    widest = max(POLICIES.values(), key=lambda policy: policy.drafted_per_node)
    return TreeSettings(policy=widest.name, size=size, depth=DEPTH)
