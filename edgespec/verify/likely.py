"""The nodes that a path is likely to visit: the head turns their hidden states into logits in one read of its weights.

A token says whose row is next, and yet most paths stay among a tree's best nodes. A head of a large vocabulary is read
as fast for a few rows as for one.
"""

from edgespec.tree.token_tree import TokenTree, all_on_path

MIN_CHANCE = 0.2  # of a node to be visited: below it, a read of the head for it alone costs less in the mean
MAX_NODES = 16


def likely_nodes(tree: TokenTree, most: int = MAX_NODES) -> tuple[int, ...]:
    """Return the nodes that are likely to be visited, likeliest first, up to the given number.

    Chances are the scores that the tree was grown by. Where there are none, the first children of first children are
    taken to be likely. This waits for the device.
    """
    if tree.num_nodes == 1:
        return (0,)
    chances = all_on_path(tree.ranks == 0, tree.parents).double() if tree.scores is None else tree.scores
    best = chances.topk(min(most, tree.num_nodes))
    return tuple(best.indices[best.values >= MIN_CHANCE].tolist())
