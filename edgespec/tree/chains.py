"""Trees without branches, for targets whose cache follows none: each node is the child of the node before.

Their children are the target's own under the text's noise, coupled: branches may then be left out of a tree after it
was drawn, and no text changes. This module is free of torch.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.tree.settings import TreeSettings, preset_shape


def branches_of(tree: TreeSettings) -> str | None:
    """Return the setting that asks for branches, or for another draw than chains have; None where nothing does."""
    if tree.policy == "none":
        return None
    if tree.target_width > 1:
        return f"target_width={tree.target_width}"
    shape = preset_shape(tree)
    if shape is not None and shape.depth < shape.num_nodes - 1:
        return f"fork={'x'.join(map(str, tree.fork))}" if tree.fork else f"policy={tree.policy}"
    if tree.max_children is not None and tree.max_children > 1:
        return f"max_children={tree.max_children}"
    return f"draw={tree.children}" if tree.children != "coupled" else None


def as_chain(tree: TreeSettings) -> TreeSettings:
    """Return settings that ask for no branches, with one child a node."""
    return replace(tree, max_children=1) if tree.uses("max_children") else tree
