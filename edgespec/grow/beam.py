"""Growth of chosen children: the most probable tokens below each node, one draft call a layer.

This engine is shared by OPT-Tree, EAGLE-2, C2T and adaptive's chosen trees. A rule gives every candidate
a score, which never grows from a node to its child (a running minimum sees to it), so that the `size`
candidates of largest score form a tree. A candidate that is not among the `size` best seen so far
can lead to none that is, so neither it nor what is below it is looked at. The finished tree is the
same as if all had been looked at, with fewer nodes drafted than the papers' own procedures need.

Chosen children are a function of the context, so any shape is lossless with membership. Coupled children are one
of the context and the text's noise: then the text is a function of both alone, and any tree is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edgespec.draft.distributions import look_at
from edgespec.grow import Growth
from edgespec.grow.children import best_children
from edgespec.grow.growing import GrowingTree, Layer, best_nodes
from edgespec.sampling.noise import TextNoise
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import root_only


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutcome:
    """A layer that was just drafted, for the rule that decides whether another follows."""

    depth: int
    beam_scores: Tensor  # [b], of the candidates that the rule would expand, best first
    gain: Tensor  # [], what the layer adds to the sum of the `size` best scores


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRule:
    """The rule of a policy of chosen children, which tells it from the others."""

    score: Callable[[Layer], Tensor]  # [k, c]
    num_candidates: int = 0  # that the score looks at together, of which the first may be children
    threshold: float = 0.0  # least score of a node
    layer_nodes: int | None = None  # most candidates kept of a layer
    layer_expanded: int | None = None  # most of them expanded
    stops: Callable[[LayerOutcome], Tensor] | None = None  # [] bool: draft no further layer


def by_path_probability(layer: Layer) -> Tensor:
    """Return the product of q along the path, the token included: [k, c]."""
    return layer.path_probability[:, None] * layer.q_drawn


def grow_beam(
    root: int,
    *,
    rule: BeamRule,
    draw: Draw,
    size: int,
    depth: int,
    max_children: int,
    device: torch.device,
    noise: TextNoise | None = None,
    keeps_q: bool = False,
) -> Growth:
    """Grow the tree of the `size` candidates of largest score, at most `depth` layers below the root.

    `Layer.values` are the scores of the parents. Nodes are numbered layer by layer, siblings from the
    most probable down. `noise` is that of coupled children; at temperature 0 they have none.
    """
    if depth == 0:
        return root_only(root, draw=draw, device=device)
    tree = GrowingTree(root, device=device, keeps_q=keeps_q)
    yield from tree.expand_root()
    values = tree.q.new_ones(1)  # scores of the nodes expanded last: [k]
    path_probability = torch.ones_like(values)  # [k]
    scores = [values.new_full((1,), torch.inf)]  # of all nodes; the root is always kept
    best, worst_kept = values.new_empty(0), values.new_zeros(())

    for layer_depth in range(1, depth + 1):
        look = partial(
            _scored,
            rule=rule,
            count=max(max_children, rule.num_candidates),
            depth=layer_depth,
            noise=None if noise is None else noise.below(layer_depth),
            of_parents=(values, path_probability, tree.rows),
        )
        drawn, q_drawn, score = look_at(tree.distributions, look)  # [k, c]
        score = torch.minimum(score, values[:, None])
        is_candidate = (q_drawn > 0) & (score >= rule.threshold)
        is_candidate[:, max_children:] = False
        is_candidate &= _is_among_best(score.masked_fill(~is_candidate, -1), rule.layer_nodes)
        # nonzero() tells the host the layer's width: with the next one, the two waits of a layer.
        row, rank = (is_candidate & (score > worst_kept)).nonzero(as_tuple=True)
        if row.shape[0] == 0:
            break
        tree.add(row, rank, drawn[row, rank])
        scores.append(score[row, rank])
        sum_before = best.sum()
        best = torch.cat([best, scores[-1]])
        if best.shape[0] >= size:
            best = best.topk(size).values
            worst_kept = best[-1]
        if layer_depth == depth:
            break
        is_expanded = _is_among_best(scores[-1], rule.layer_expanded) & (scores[-1] > worst_kept)
        (expanded,) = is_expanded.nonzero(as_tuple=True)
        if expanded.shape[0] == 0:
            break
        if rule.stops is not None:
            beam = score[is_candidate].sort(descending=True).values[: rule.layer_expanded]
            if bool(rule.stops(LayerOutcome(depth=layer_depth, beam_scores=beam, gain=best.sum() - sum_before))):
                break
        yield from tree.expand(expanded)
        values = scores[-1][expanded]
        path_probability = (path_probability[:, None] * q_drawn)[row, rank][expanded]

    all_scores = torch.cat(scores)
    return tree.finished(draw, best_nodes(all_scores, size + 1), scores=all_scores)


def _scored(
    q: Tensor,
    rows: slice,
    *,
    rule: BeamRule,
    count: int,
    depth: int,
    noise: Tensor | None,
    of_parents: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` best children below a chunk of parents, what they are valued by and their scores: [j, c] each.

    q [j, vocab] is that of the parents `rows`; `of_parents` are the values, path probabilities and draft's rows [k] of
    all of them.
    """
    drawn, q_drawn = best_children(q, count, noise)
    values, path_probability, draft_rows = (column[rows] for column in of_parents)
    layer = Layer(
        depth=depth,
        draft_q=q,
        noise=noise,
        drawn=drawn,
        q_drawn=q_drawn,
        values=values,
        path_probability=path_probability,
        rows=draft_rows,
    )
    return drawn, q_drawn, rule.score(layer)


def _is_among_best(scores: Tensor, count: int | None) -> Tensor:
    """Return bool of the shape of `scores`: whether each is one of the `count` largest; ties go to the first."""
    if count is None or count >= scores.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    # Without a sort: a layer may have hundreds of thousands of candidates.
    flat = scores.flatten()
    least = flat.topk(count).values[-1]
    above, is_tied = flat > least, flat == least
    return (above | (is_tied & (is_tied.cumsum(0) <= count - above.sum()))).view_as(scores)
