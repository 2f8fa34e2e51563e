"""Best-first growth of sampled children, one draft call a layer.

A slot (u, k) is the k-th child position at node u. A policy predicts a(u, k), the acceptance of the
token drawn there, and with it

    V(root) = 1      s(u, k) = V(u) * prod_{j<k} (1 - a(u, j))      V(child) = s(u, k) * a(u, k)

s is the chance that verification gets as far as trying the slot. Slots are selected by a gain g: s,
made to never grow from a node to its child or to its next sibling by a running minimum. So the m
slots of largest g form a tree, and they can be found layer by layer: draw a slot only while its g
beats the m-th largest seen so far, expand a node only if its first slot's could, stop when nothing
qualifies, keep the m largest. This is, for the same noise, the tree of DySpec's Algorithm 1 (a heap,
one token at a time) with at most `max_children` a node, for which the paper has no bound.

What decides on a slot is g, known before its token is drawn. Selecting by anything that knows the
token would bias the output.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from edgespec.grow.growing import GrowingTree, GrowthAlone, Layer, best_nodes
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling.draws import draw_without_replacement
from edgespec.tree.token_tree import root_only

PredictSlots = Callable[[Layer], Tensor]  # a layer -> a of its drawn tokens, [k, c]


def grow_best_first(
    root: int, *, predict: PredictSlots, size: int, depth: int, threshold: float, max_children: int, draws: TextDraws
) -> GrowthAlone:
    """Grow the tree of the `size` slots of largest gain, none below `threshold`.

    The tree has at most `depth` layers below the root. Nodes are numbered layer by layer, siblings in the order of
    their draw. All limits must have been fixed before the step began.
    """
    if depth == 0:
        return root_only(root, draw="sampled", device=draws.device)
    tree = GrowingTree(root, device=draws.device, keeps_draft_probs=True)
    yield from tree.expand()
    values = tree.q.new_ones(1)  # V of the nodes expanded last: [k]
    path_probability = tree.q.new_ones(1)  # [k]
    node_gains = tree.q.new_full((1,), torch.inf)  # and g of their slots: [k]
    gains = [node_gains]  # of all nodes; the root is always kept
    best, worst_kept = tree.q.new_empty(0), tree.q.new_zeros(())

    for layer_depth in range(1, depth + 1):
        drawn, q_drawn = draw_without_replacement(tree.q, max_children, draws.generator)  # [k, c]
        layer = Layer(
            depth=layer_depth,
            draft_q=tree.q,
            noise=None,
            drawn=drawn,
            q_drawn=q_drawn,
            values=values,
            path_probability=path_probability,
            rows=tree.rows,
        )
        slot_gains, child_values = _slot_values(predict, layer, node_gains)
        chosen = (slot_gains > worst_kept) & (slot_gains >= threshold) & (q_drawn > 0)
        # The host waits for the layer's width here and at the next nonzero(): twice a layer.
        row, rank = chosen.nonzero(as_tuple=True)
        if row.shape[0] == 0:
            break
        tree.add(row, rank, drawn[row, rank])
        gains.append(slot_gains[row, rank])
        best = torch.cat([best, gains[-1]])
        if best.shape[0] >= size:
            best = best.topk(size).values
            worst_kept = best[-1]
        layer_values = child_values[row, rank]
        most = torch.minimum(layer_values, gains[-1])  # that a slot below can gain
        (expanded,) = ((most > worst_kept) & (most >= threshold)).nonzero(as_tuple=True)
        if layer_depth == depth or expanded.shape[0] == 0:
            break
        yield from tree.expand(expanded)
        values, node_gains = layer_values[expanded], gains[-1][expanded]
        path_probability = (path_probability[:, None] * q_drawn)[row, rank][expanded]

    scores = torch.cat(gains)
    return tree.finished("sampled", best_nodes(scores, size + 1), scores=scores)


def _slot_values(predict: PredictSlots, layer: Layer, node_gains: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gain of every slot and V of the child in it, [k, c] each.

    `node_gains` [k] are the gains of the parents' slots.
    """
    acceptance = predict(layer)
    rejected = torch.cumprod(1 - acceptance, 1)
    tried = torch.cat([torch.ones_like(rejected[:, :1]), rejected[:, :-1]], 1)
    s = layer.values[:, None] * tried
    gains = torch.minimum(s, node_gains[:, None]).cummin(1).values
    return gains, s * acceptance
