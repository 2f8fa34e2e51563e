"""Growth of a tree whose shape is known beforehand: Sequoia, SpecInfer, MCSD, chains, preset trees.

The shape says where children stand; the draw fills them in. The layers need index tensors of the shape, which
are made once, and so is the mask: nodes stand in layer order, so that the mask of a tree
that ends early is the upper left corner of the whole one (Improving-MCSD, section 3.2).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edgespec.draft.distributions import look_at
from edgespec.grow.children import best_children
from edgespec.grow.growing import GrowingTree, GrowthAlone, Layer
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling.draws import draw_without_replacement
from edgespec.tree.policies import Draw
from edgespec.tree.shapes import TreeShape
from edgespec.tree.token_tree import TokenTree, all_on_path, ancestors_mask, root_only

# Some nodes and the tokens drawn below them -> bool of each: drafting further below it is useless. Growth ends where
# it is useless below all. Only tokens drawn already may decide: then the output is unbiased.
Stops = Callable[[Layer], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapeLayer:
    """Where the j nodes of a layer hang, and which of them have children."""

    row: Tensor  # [j], of the expanded nodes of the layer above
    rank: Tensor  # [j]
    num_drawn: int  # children drawn below each of those: the most that any has
    expanded: Tensor  # [k], of this layer's nodes


class StaticShape:
    """A shape as index tensors on a device, with its mask."""

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        self.depth = shape.depth
        self.ancestors = ancestors_mask(torch.tensor(shape.parents, device=device))  # [n, n]
        has_children = set(shape.parents)
        self.layers: list[_ShapeLayer] = []
        above = {0: 0}  # node -> its row among the expanded nodes of the layer above
        for start, end in zip(shape.layer_ends, shape.layer_ends[1:], strict=False):
            nodes = range(start, end)
            expanded = [node for node in nodes if node in has_children]
            self.layers.append(
                _ShapeLayer(
                    row=torch.tensor([above[shape.parents[node]] for node in nodes], device=device),
                    rank=torch.tensor([shape.ranks[node] for node in nodes], device=device),
                    num_drawn=1 + max(shape.ranks[node] for node in nodes),
                    expanded=torch.tensor([node - start for node in expanded], dtype=torch.long, device=device),
                )
            )
            above = {node: row for row, node in enumerate(expanded)}


@functools.lru_cache(maxsize=8)
def static_shape(shape: TreeShape, device: torch.device) -> StaticShape:
    """Put the shape on a device; this is done once, for every text of a run grows it."""
    return StaticShape(shape, device)


def grow_static(
    root: int,
    *,
    shape: StaticShape,
    depth: int,
    draw: Draw,
    draws: TextDraws,
    stops: Stops | None = None,
    first_tokens: Tensor | None = None,
) -> GrowthAlone:
    """Fill the shape with tokens, at most `depth` layers of it.

    `first_tokens` [w] are the root's children where they are given, at most as many as the shape has there.

    Positions for which the draft has no token of positive probability left are empty, with all below.
    """
    if depth == 0:
        return root_only(root, draw=draw, device=draws.device)
    device, noise = draws.device, draws.shared_noise if draw == "coupled" else None
    tree = GrowingTree(root, device=device, keeps_draft_probs=draws.keeps_draft_probs or draw == "sampled")
    yield from tree.expand()
    is_token = [torch.ones(1, dtype=torch.bool, device=device)]
    path_probability = tree.q.new_ones(1)  # of the nodes expanded last: [k]
    for layer_depth, layer in enumerate(shape.layers[:depth], start=1):
        is_last = layer_depth == min(depth, shape.depth)
        own = _LayerDraws(
            depth=layer_depth,
            count=layer.num_drawn,
            generator=draws.generator if draw == "sampled" else None,
            noise=None if noise is None else noise.below(layer_depth),
            fixed_tokens=first_tokens if layer_depth == 1 else None,
            stops=None if is_last else stops,
        )
        look = partial(_looked_at, draws=own, of_parents=(path_probability, tree.rows))
        q_drawn, drawn, is_useless = look_at(tree.distributions, look)
        tree.add(layer.row, layer.rank, drawn[layer.row, layer.rank])
        is_token.append(q_drawn[layer.row, layer.rank] > 0)
        if is_last:
            break
        if stops is not None:
            path_probability = (path_probability[:, None] * q_drawn)[layer.row, layer.rank][layer.expanded]
            if bool(is_useless.all()):  # the next layer depends on it: a wait, where early exits are in use
                break
        yield from tree.expand(layer.expanded)
    return _without_empty(tree, torch.cat(is_token), draw, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerDraws:
    """How the children of one layer's nodes are drawn."""

    depth: int
    count: int  # a node
    generator: torch.Generator | None  # of sampled children; None: the best ones
    noise: Tensor | None  # of coupled children
    fixed_tokens: Tensor | None  # [w]: tokens that are taken instead
    stops: Stops | None


def _looked_at(
    q: Tensor, rows: slice, *, draws: _LayerDraws, of_parents: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and tokens [j, count] of the children of a chunk of parents, and the answer of `stops` for each: [j].

    q [j, vocab] is that of the parents `rows`; `of_parents` are the path probabilities and the draft's rows [k] of all
    of them.
    """
    q_drawn, drawn = _drawn(q, draws)
    if draws.stops is None:
        return q_drawn, drawn, torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    path_probability, draft_rows = (column[rows] for column in of_parents)
    layer = Layer(
        depth=draws.depth,
        draft_q=q,
        noise=None if draws.fixed_tokens is not None else draws.noise,
        drawn=drawn,
        q_drawn=q_drawn,
        values=path_probability,
        path_probability=path_probability,
        rows=draft_rows,
    )
    return q_drawn, drawn, draws.stops(layer)


def _drawn(q: Tensor, draws: _LayerDraws) -> tuple[Tensor, Tensor]:
    """Return q and tokens of `count` children a row of q [k, vocab]: [k, count] each, q 0 where there are no more."""
    if draws.fixed_tokens is not None:
        drawn, q_drawn = draws.fixed_tokens[None], q.new_ones(1, len(draws.fixed_tokens))
    elif draws.generator is not None:
        drawn, q_drawn = draw_without_replacement(q, draws.count, draws.generator)
    else:
        drawn, q_drawn = best_children(q, draws.count, draws.noise)
    return _padded(q_drawn, drawn, draws.count)


def _padded(q_drawn: Tensor, drawn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return both padded to [k, count], with q 0: a vocabulary may be smaller than the shape is wide."""
    missing = (0, count - drawn.shape[1])
    return torch.nn.functional.pad(q_drawn, missing), torch.nn.functional.pad(drawn, missing)


def _without_empty(tree: GrowingTree, is_token: Tensor, draw: Draw, shape: StaticShape) -> TokenTree:
    """Return the tree of the positions that hold a token [n], and whose ancestors all do."""
    count = is_token.shape[0]
    # The one wait for the device, where nothing stops early.
    if bool(is_token.all()):
        return tree.finished(draw, ancestors=shape.ancestors[:count, :count])
    (kept,) = all_on_path(is_token, tree.parents).nonzero(as_tuple=True)
    return tree.finished(draw, kept)
