"""The token tree consists of flat tensors, and node 0 is the root. Everything else about it is derived.

Legend: n nodes with the root, which is the last committed token; a node's children continue it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.to_device import on_device
from edgespec.tree.policies import Draw


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """A tree of candidate continuations.

    Parents come before their children, and siblings stand in the order in which they were drawn.
    """

    tokens: Tensor  # [n] long
    parents: Tensor  # [n] long, -1 for the root alone
    ranks: Tensor  # [n] long, position among the siblings
    draw: Draw
    draft_rows: Tensor  # [n] long, the drafter's row of the node; -1 where the draft did not expand it
    # [rows, vocab], the draft's distribution after each row, where the rule or a record needs it
    draft_probs: Tensor | None = None
    ancestors: Tensor | None = None  # [n, n], `ancestors_mask` where a static shape has it already
    # [n], the scores by which growth selected nodes, the root's the largest: the m best are the tree of budget m.
    # None where the shape was fixed.
    scores: Tensor | None = None
    looked_up: tuple[bool, ...] | None = None  # of each node, whether the text alone proposed it; None: of none

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included: these are the rows of a verify pass."""
        return self.tokens.shape[0]


def root_only(token: int, *, draw: Draw, device: torch.device) -> TokenTree:
    """Return the tree of plain decoding: a root and nothing below it."""
    return TokenTree(
        tokens=on_device([token], device),
        parents=on_device([-1], device),
        ranks=torch.zeros(1, dtype=torch.long, device=device),
        draw=draw,
        draft_rows=on_device([-1], device),
    )


def chain_of(tokens: Tensor) -> TokenTree:
    """Return the tree of tokens [n] that follow each other, of which no draft knows anything."""
    places = torch.arange(tokens.shape[0], device=tokens.device)
    return TokenTree(
        tokens=tokens,
        parents=places - 1,
        ranks=torch.zeros_like(places),
        draw="coupled",
        draft_rows=torch.full_like(places, -1),
    )


def _doubled(parents: Tensor) -> Iterator[Tensor]:
    """Yield each node's ancestor 1, 2, 4, ... steps up, or the root, until all have reached it.

    The number of steps follows from the number of nodes: no value is read from the device.
    """
    ancestor = parents.clamp(min=0)
    for _ in range(max(1, (parents.shape[0] - 1).bit_length())):
        yield ancestor
        ancestor = ancestor[ancestor]


def depths(parents: Tensor) -> Tensor:
    """Return the number of edges from the root to each node: [n]."""
    distance = (parents >= 0).long()
    for ancestor in _doubled(parents):
        distance = distance + distance[ancestor]
    return distance


def depths_on_host(parents: Sequence[int]) -> list[int]:
    """Return the same of parents that are on the host already."""
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


def ancestors_mask(parents: Tensor) -> Tensor:
    """Return the mask [n, n] bool whose row i marks node i and all its ancestors."""
    mask = torch.eye(parents.shape[0], dtype=torch.bool, device=parents.device)
    for ancestor in _doubled(parents):  # before, each row has the nearest 1, 2, 4, ... nodes of its path
        mask = mask | mask[ancestor]
    return mask


def all_on_path(flags: Tensor, parents: Tensor) -> Tensor:
    """Return [n] bool: whether `flags` [n] holds for a node and all its ancestors."""
    for ancestor in _doubled(parents):
        flags = flags & flags[ancestor]
    return flags


def product_on_path(factors: Tensor, parents: Tensor) -> Tensor:
    """Return the product of `factors` [n] from the root, whose own must be 1, to each node: [n]."""
    for ancestor in _doubled(parents):
        factors = factors * factors[ancestor]
    return factors
