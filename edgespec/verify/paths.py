"""The tokens on the way from a tree's root to each of its nodes, which a text's processors count as text."""

from collections.abc import Callable

import torch
from torch import Tensor

from edgespec.sampling.processors import LogitProcessors
from edgespec.tree.token_tree import TokenTree

ProcessNode = Callable[[Tensor, int], Tensor]  # logits [1, vocab] after a node, its number -> processed logits


def on_paths(processors: LogitProcessors, tree: TokenTree) -> ProcessNode:
    """Return the processors of a text as those of the nodes of its tree; the root is part of the text."""
    # One wait for the device, for 2n numbers, which verification would wait for too.
    parents, tokens = torch.stack([tree.parents, tree.tokens]).tolist()

    def process(logits: Tensor, node: int) -> Tensor:
        path: list[int] = []
        while node > 0:
            path.append(tokens[node])
            node = parents[node]
        return processors(logits, path[::-1])

    return process
