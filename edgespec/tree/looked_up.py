"""What looked up text means for the settings of trees: where it may join them, and what a target alone grows."""

from edgespec.config import SamplingSettings
from edgespec.tree.settings import DEFAULT_SIZE, MAX_LOOKED_UP_LAYERS, TreeSettings


def may_look_up(tree: TreeSettings, sampling: SamplingSettings) -> bool:
    """Return whether trees may have looked up tokens: where the target's own token decides, which token it is."""
    follows_target = sampling.temperature == 0 or tree.children == "coupled"
    return tree.lookup and tree.policy != "none" and tree.is_lossless and follows_target


def without_draft(tree: TreeSettings) -> TreeSettings:
    """Return the trees of a target alone: what the text has had before, or none."""
    if not tree.needs_draft:
        return tree
    if not tree.lookup:
        return tree.plain()
    size = tree.size if tree.uses("size") else DEFAULT_SIZE
    return TreeSettings(policy="lookup", size=size, draft_temperature=tree.draft_temperature)


def num_positions(tree: TreeSettings) -> int:
    """Return the most positions behind the root that a tree may reach, by the draft or by looked up text."""
    return max(tree.num_layers, min(tree.num_nodes, MAX_LOOKED_UP_LAYERS)) if tree.lookup else tree.num_layers
