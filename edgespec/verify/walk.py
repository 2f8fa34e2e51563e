"""A walk down a tree by tokens that the target chooses: greedy and coupled verification, and membership.

Each is exact for every tree that the choices of this pass had no part in: the tree only says whether the row behind a
token is known already.
"""

from collections.abc import Callable

import torch

from edgespec.sampling.draws import draw_one
from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance, Verification
from edgespec.verify.rows import TargetRows


def verify_greedy(tree: TokenTree, rows: TargetRows, _generator: torch.Generator) -> Verification:
    """Follow the target's first choices, at temperature 0; this is exact for any draw."""
    return walk(tree, lambda node, _depth: rows.best(node), rows.is_near_tie)


def verify_coupled(tree: TokenTree, rows: TargetRows, noise: TextNoise) -> Verification:
    """Follow argmax(log p + g), which the target draws with the text's own noise.

    The token is decided by p and the noise alone: any tree gives the same text. Raises ValueError for
    trees that were sampled with noise of their own.
    """
    if tree.draw != "coupled":
        raise ValueError(f"the text's noise does not go with draw '{tree.draw}', which has noise or a rule of its own")
    return walk(tree, lambda node, depth: noise.draw(rows.probs(node), depth + 1), rows.is_near_tie)


def verify_membership(tree: TokenTree, rows: TargetRows, generator: torch.Generator) -> Verification:
    """Draw from p, and follow where the tree has the token; raises ValueError for trees that were sampled.

    Sampled children are refused because multi-round rejection accepts more of them, not because the output would be
    biased.
    """
    if tree.draw != "chosen":
        raise ValueError(
            f"membership does not go with draw '{tree.draw}': "
            "use it with 'chosen', and multi-round rejection with 'sampled'"
        )
    return walk(tree, lambda node, _depth: draw_one(rows.probs(node), generator))


def walk(
    tree: TokenTree, choose: Callable[[int, int], int], is_near_tie: Callable[[int, int, int], bool] | None = None
) -> Verification:
    """Go from the root to the child of the token that `choose` names, as long as there is one.

    `choose` takes a node and the number of layers down to it, and returns the token after it. The path ends where
    `is_near_tie` says of these and the token that another one may be right. The head computes the rows of the path
    alone: a handful, where the tree may have hundreds.
    """
    # A wait for the device, for 2n numbers; then those of `choose`: its token says whose row is next.
    pairs = torch.stack([tree.parents, tree.tokens], 1).tolist() if tree.num_nodes > 1 else []
    children: dict[tuple[int, int], int] = {(parent, token): node for node, (parent, token) in enumerate(pairs)}
    path: list[int] = []
    node = 0
    while True:
        yield node
        token = choose(node, len(path))
        if is_near_tie is not None and is_near_tie(node, len(path), token):
            return Acceptance(path=tuple(path), next_token=token, is_near_tie=True)
        child = children.get((node, token))
        if child is None:
            return Acceptance(path=tuple(path), next_token=token)
        path.append(child)
        node = child
