"""Whether trees have room in memory that was planned for others."""

from __future__ import annotations

from edgespec.errors import EdgespecError
from edgespec.placement.cache_memory import cache_rows
from edgespec.placement.memory import draft_probs_rows
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeSettings


def check_tree_fits(tree: TreeSettings, planned: TreeSettings, run_config: RunConfig, *, vocab: int) -> None:
    """Raise EdgespecError for trees that need more memory than those that it was planned for.

    `vocab` is the draft's: sampled trees keep its distributions.
    """
    probs_rows, planned_probs_rows = (draft_probs_rows(vocab, one, run_config) for one in (tree, planned))
    has_rows = all(rows <= there for rows, there in zip(cache_rows(0, tree), cache_rows(0, planned), strict=True))
    if has_rows and probs_rows <= planned_probs_rows:
        return
    drafted_per_node = tree.num_drafted // (tree.num_nodes + 1)
    num_drafted = (
        planned.num_drafted if probs_rows <= planned_probs_rows else min(planned.num_drafted, planned_probs_rows)
    )
    largest = max(0, min(planned.num_nodes, num_drafted // drafted_per_node - 1))
    raise EdgespecError(
        "E_TREE_SIZE",
        f"{tree.policy} trees of {tree.num_nodes} nodes need more memory than is planned, which has room for "
        f"{largest}.",
        f"Use {largest} or less, or start with `policy={tree.policy}`, `size={tree.num_nodes}`.",
    )
