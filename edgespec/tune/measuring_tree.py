"""How large a tree can be measured in the memory there is."""

from __future__ import annotations

from dataclasses import replace

from edgespec.config import MAX_TREE_SIZE
from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair
from edgespec.placement.pair_setup import PairSetup
from edgespec.placement.place import pair_weights, place_weights, read_memory
from edgespec.placement.run_config import RunConfig
from edgespec.placement.weights import notes_of_draft
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings
from edgespec.tune.run import DEPTH

SMALLEST = 16
MIN_SHARE = 0.9  # of the layers that a small tree leaves resident: more must not be given up for measuring


def set_up_to_measure(pair: ModelPair, run_config: RunConfig) -> PairSetup:
    """The pair with the largest tree that leaves the layers where they would be in use, of the policy that drafts most.

    Raises EdgespecError where not even a small one fits.
    """
    run_config = replace(run_config, keeps_draft_probs=True)
    weights = pair_weights(pair.target, pair.draft, run_config)
    memory = read_memory(run_config.limits, run_config.device)
    notes = notes_of_draft(weights.target, weights.draft, run_config.context_tokens)

    def set_up(size: int) -> PairSetup:
        tree = widest_tree(size)
        return PairSetup(pair=pair, run_config=run_config, tree=tree, largest_tree=tree, notes=notes,
                         weights=place_weights(weights, tree, run_config, memory))  # fmt: skip

    smallest = set_up(SMALLEST)
    for size in (MAX_TREE_SIZE // part for part in (1, 2, 3, 6, 12, 24)):
        try:
            found = set_up(size)
        except EdgespecError:
            continue
        if found.placement.resident_share >= MIN_SHARE * smallest.placement.resident_share:
            return found
    return smallest


def widest_tree(size: int) -> TreeSettings:
    """Trees of `size` nodes of the policy that drafts most."""
    widest = max(POLICIES.values(), key=lambda policy: policy.drafted_per_node)
    return TreeSettings(policy=widest.name, size=size, depth=DEPTH)
