"""One tree of what the draft grew and of what was looked up: the best nodes of both.

A token below a parent is one node, wherever it comes from: children that stood twice would have a rank too many, and
verification would take but one. Its chance after its parent is the larger one of both; siblings share what there is.
A node's score is the product of these along its path, so that the best nodes are a tree. All of it is a few dozen
numbers on the host, which verification fetches anyway.

Source of merged trees: SpecInfer, section 3. Only trees that are verified by the target's own token take candidates
of any origin: the greedy and the coupled rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from edgespec.draft.lookup import LookedUp
from edgespec.grow.beam import Beam
from edgespec.grow.growing import GrowthAlone
from edgespec.to_device import on_device
from edgespec.tree.token_tree import TokenTree

BY_RANK = (0.6, 0.15, 0.08, 0.05, 0.03)  # chances of a fixed shape's children; the last of all others

# Chances of nodes, best first, and how many of them the draft grew -> how many to take
NumToTake = Callable[[Sequence[float], int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The growth of a tree that also has what was looked up."""

    drafted: TokenTree | Beam | GrowthAlone
    looked_up: Sequence[LookedUp]
    num_to_take: NumToTake
    is_chain: bool = False  # whether a node may have but one child


@dataclass(slots=True)
class _Node:
    """A node of the merged tree."""

    parent: int  # among these nodes; -1 for the root
    token: int
    layer: int
    draft_row: int = -1
    drafted: float = 0.0  # its chance after its parent, by the draft
    looked_up: float = 0.0  # and by the text
    score: float = 1.0
    children: dict[int, int] = field(default_factory=dict)  # by token


def merged(
    drafted: TokenTree, looked_up: Sequence[LookedUp], num_to_take: NumToTake, *, is_chain: bool = False
) -> TokenTree:
    """Return the tree of the best nodes of both; with `is_chain` those of the best path."""
    if not looked_up:
        return drafted
    nodes = _nodes_of(drafted)
    num_drafted = len(nodes) - 1
    _add(nodes, looked_up)
    _score(nodes)
    candidates = _best_path(nodes) if is_chain else range(1, len(nodes))
    order = sorted(candidates, key=lambda node: (-nodes[node].score, nodes[node].layer))
    order = order[: num_to_take([nodes[node].score for node in order], num_drafted)]
    # Layer by layer, siblings from the best down: the sort is stable.
    kept = [0, *sorted(order, key=lambda node: nodes[node].layer)]
    number = {node: place for place, node in enumerate(kept)}
    ranks, seen = [0], dict[int, int]()
    for node in kept[1:]:
        parent = nodes[node].parent
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    device = drafted.tokens.device
    columns = on_device(
        [
            [nodes[node].token for node in kept],
            [-1, *(number[nodes[node].parent] for node in kept[1:])],
            ranks,
            [nodes[node].draft_row for node in kept],
        ],
        device,
    )
    scores = on_device([torch.inf, *(nodes[node].score for node in kept[1:])], device, torch.float32)
    return replace(
        drafted,
        tokens=columns[0],
        parents=columns[1],
        ranks=columns[2],
        draft_rows=columns[3],
        ancestors=None,
        scores=scores,
        looked_up=tuple(nodes[node].drafted == 0 for node in kept),
    )


def scores_by_rank(parents: Sequence[int], ranks: Sequence[int]) -> list[float]:
    """Return scores of a tree whose shape was given: products of chances by rank along the path; the root's is 1."""
    scores = [1.0]
    for parent, rank in zip(parents[1:], ranks[1:], strict=True):
        scores.append(scores[parent] * BY_RANK[min(rank, len(BY_RANK) - 1)])
    return scores


def _nodes_of(tree: TokenTree) -> list[_Node]:
    """Return the nodes of the draft's tree, with their chances after their parents."""
    if tree.num_nodes == 1:
        return [_Node(-1, int(tree.tokens[0]), 0, int(tree.draft_rows[0]), 1.0)]
    # One wait for the device; numbers of nodes and tokens are exact in float64.
    columns = [tree.tokens, tree.parents, tree.ranks, tree.draft_rows]
    tokens, parents, ranks, rows = (column.tolist() for column in columns)
    scores = scores_by_rank(parents, ranks) if tree.scores is None else tree.scores.tolist()
    scores[0] = 1.0
    nodes = [_Node(-1, tokens[0], 0, rows[0], 1.0)]
    for token, parent, row, score in zip(tokens[1:], parents[1:], rows[1:], scores[1:], strict=True):
        above = nodes[parent]
        above.children[token] = len(nodes)
        nodes.append(_Node(parent, token, above.layer + 1, row, min(1.0, score / max(scores[parent], 1e-30))))
    return nodes


def _add(nodes: list[_Node], looked_up: Sequence[LookedUp]) -> None:
    """Give what was looked up its nodes: those of the draft, where it has the same."""
    places: list[int] = []
    for found in looked_up:
        parent = 0 if found.parent < 0 else places[found.parent]
        chance_above = 1.0 if found.parent < 0 else looked_up[found.parent].chance
        place = nodes[parent].children.get(found.token)
        if place is None:
            place = nodes[parent].children[found.token] = len(nodes)
            nodes.append(_Node(parent, found.token, found.layer))
        nodes[place].looked_up = found.chance / chance_above
        places.append(place)


def _best_path(nodes: Sequence[_Node]) -> list[int]:
    """Return the nodes below the root of the path of most expected tokens; a node's score is its chance."""
    expected = [0.0]
    for node in nodes[1:]:  # parents come first
        expected.append(expected[node.parent] + node.score)
    path = [max(range(len(nodes)), key=expected.__getitem__)]
    while path[-1] > 0:
        path.append(nodes[path[-1]].parent)
    return path[-2::-1]


def _score(nodes: list[_Node]) -> None:
    """Set the scores: a parent's times the node's chance after it; chances of siblings are at most 1 together."""
    for node in nodes:
        over = max(1.0, sum(max(nodes[child].drafted, nodes[child].looked_up) for child in node.children.values()))
        for child in node.children.values():
            one = nodes[child]
            one.score = node.score * max(one.drafted, one.looked_up) / over
