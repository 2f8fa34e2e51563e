"""Static tree shapes: the places of children before any token is known. This module is free of torch.

Nodes stand in layer order, siblings by rank, so that the first `layer_ends[d]` nodes are the tree that
is cut at depth d.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.config import MAX_TREE_SIZE, require
from edgespec.errors import EdgespecError
from edgespec.validation import parse_json, shown

# EAGLE-1's tree of 25 nodes and Medusa's of 63, as their authors published them for 7B models
PRESETS = {file.stem: file for file in sorted((Path(__file__).parent / "presets").glob("*.json"))}

SMALLER = "Choose a smaller shape."

Ranks = tuple[int, ...]  # the way from the root to a node: its rank, and those of its ancestors


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree without tokens; node 0 is the root. Raises EdgespecError for parents that make no tree."""

    parents: tuple[int, ...]  # [n], -1 for the root

    def __post_init__(self) -> None:
        count = len(self.parents)
        require(
            2 <= count <= MAX_TREE_SIZE + 1,
            f"a tree of {count - 1} nodes below its root is not in [1, {MAX_TREE_SIZE}].",
            SMALLER,
        )
        require(self.parents[0] == -1, f"node 0 has parent {self.parents[0]}.", "It is the root: -1.")
        for node, parent in enumerate(self.parents[1:], start=1):
            require(
                0 <= parent < node,
                f"node {node} has parent {parent}.",
                "Parents are numbers of earlier nodes; node 0 is the root.",
            )
        require(
            all(left <= right for left, right in itertools.pairwise(self.parents[1:])),
            "the nodes are not in layer order.",
            "Order them layer by layer, the children of a node side by side.",
        )

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of layers from the root to every node: [n]."""
        found: list[int] = [0]
        for parent in self.parents[1:]:
            found.append(found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """The number of layers below the root."""
        return self.depths[-1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The position of every node among its siblings: [n]."""
        found = [0]
        for node in range(1, self.num_nodes):
            found.append(found[-1] + 1 if self.parents[node] == self.parents[node - 1] else 0)
        return tuple(found)

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """The number of nodes down to each depth, the root's first: [depth + 1]."""
        depths = self.depths
        return tuple(sum(depth <= layer for depth in depths) for layer in range(self.depth + 1))


def expansion(branching: Sequence[int]) -> TreeShape:
    """Return the tree whose nodes of layer d have branching[d] children each.

    This is SpecInfer's <k1, k2, ...> and MCSD's k1 x k2 x ...; Improving-MCSD's dynamic variant (section 3.2) has
    chains side by side: (width, 1, 1, ...).
    """
    parents, layer = [-1], [0]
    for count in branching:
        num_nodes = len(parents) - 1 + len(layer) * count
        require(num_nodes <= MAX_TREE_SIZE, f"the tree has {num_nodes} nodes, more than {MAX_TREE_SIZE}.", SMALLER)
        below = [parent for parent in layer for _ in range(count)]
        layer = list(range(len(parents), len(parents) + len(below)))
        parents += below
    return TreeShape(tuple(parents))


def chain(length: int) -> TreeShape:
    """Return one chain, one token a layer: plain speculative decoding."""
    return expansion((1,) * length)


def from_paths(paths: Sequence[Ranks]) -> TreeShape:
    """Return the tree of these paths of ranks, in any order; raises EdgespecError for a path without its parent."""
    known: dict[Ranks, int] = {(): 0}
    parents = [-1]
    for path in sorted(paths, key=lambda path: (len(path), path)):
        require(path not in known, f"the path {list(path)} stands twice.", "Leave one out.")
        require(path[:-1] in known, f"the path {list(path)} has no parent {list(path[:-1])}.", "Add it.")
        rank = path[-1]
        require(
            rank == 0 or (*path[:-1], rank - 1) in known,
            f"the path {list(path)} has no sibling of rank {rank - 1}.",
            "Ranks of siblings count from 0.",
        )
        parents.append(known[path[:-1]])
        known[path] = len(known)
    return TreeShape(tuple(parents))


def read_shape(path: Path) -> TreeShape:
    """Read a preset tree from a JSON file: a list of paths of ranks (Medusa, EAGLE-1), or {"parents": [...]}.

    The name of one of PRESETS is a file too, if there is no other file of that name. Raises EdgespecError with the
    file's name and the fault in it.
    """
    try:
        file = PRESETS[str(path)] if str(path) in PRESETS and not path.exists() else path
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = f"Check the path, or name a preset: {', '.join(PRESETS)}."
        raise EdgespecError("E_FILE_NOT_FOUND", f"'{path}' does not exist.", what) from error
    except (OSError, ValueError) as error:
        raise EdgespecError("E_SETTING", f"'{path}' cannot be read as JSON ({error}).", FORMATS) from error
    try:
        return _from_content(content)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"'{path}': {error.what}", error.fix) from error


FORMATS = 'Write a list of paths, as [[0], [1], [0, 0]], or {"parents": [-1, 0, 0, 1]}.'


def _from_content(content: Any) -> TreeShape:
    if isinstance(content, dict):
        require(content.keys() == {"parents"}, f"the keys are {sorted(content)}.", FORMATS)
        parents = content["parents"]
        require(isinstance(parents, list), "parents is no list.", FORMATS)
        for node, parent in enumerate(parents):
            require(_is_number(parent) and parent >= -1, f"node {node} has parent {shown(parent)}.", FORMATS)
        return TreeShape(tuple(parents))
    require(isinstance(content, list), "it is neither a list nor an object.", FORMATS)
    for path in content:
        is_path = isinstance(path, list) and len(path) > 0 and all(_is_number(rank) and rank >= 0 for rank in path)
        require(is_path, f"{shown(path)} is no path of ranks.", FORMATS)
    return from_paths([tuple(path) for path in content])


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
