"""Best-first growth of sampled children, one draft call a layer.

A slot (u, k) is the k-th child position at node u. A policy predicts a(u, k), the acceptance of the
token drawn there, and with it

    V(root) = 1      s(u, k) = V(u) * prod_{j<k} (1 - a(u, j))      V(child) = s(u, k) * a(u, k)

s is the chance that verification gets as far as trying the slot. It never grows from a node to its
child or to its next sibling, so the m slots of largest s form a tree, and they can be found layer
by layer: draw a slot only while its s beats the m-th largest seen so far, expand a node only if its
first slot would, stop when nothing qualifies, keep the m largest. For the same noise this is the
tree of DySpec's Algorithm 1 (a heap, one token at a time).

What decides on a slot is s, known before its token is drawn. Selecting by anything that knows the
token would bias the output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgespec.draft import Drafter
from edgespec.sampling import draw_without_replacement
from edgespec.tree import TokenTree, root_only

# q of the drawn tokens [k, c] and the mass that was left before each draw [k, c] -> acceptance [k, c]
PredictAcceptance = Callable[[Tensor, Tensor], Tensor]


def grow_best_first(
    drafter: Drafter,
    root: int,
    *,
    predict: PredictAcceptance,
    size: int,
    depth: int,
    threshold: float,
    max_children: int,
    vocab: int,
    device: torch.device,
    generator: torch.Generator,
) -> TokenTree:
    """The `size` slots of largest s, none below `threshold`, at most `depth` layers below the root.

    Nodes are numbered layer by layer, siblings in the order of their draw. All limits must have been
    fixed before the step began.
    """
    if depth == 0:
        return root_only(root, vocab=vocab, device=device)
    # One entry a layer of the tree, the root's first; node numbers count through all layers.
    tokens = [torch.tensor([root], device=device)]
    parents = [torch.tensor([-1], device=device)]
    ranks = [torch.zeros(1, dtype=torch.long, device=device)]
    draft_rows = [torch.zeros(1, dtype=torch.long, device=device)]
    q = [drafter.expand(tokens[0], parents[0])]  # [k, vocab]
    slot_values = [q[0].new_full((1,), torch.inf)]  # the root is always kept
    values = q[0].new_ones(1)  # V of the nodes expanded last: [k]
    nodes = torch.zeros(1, dtype=torch.long, device=device)  # their numbers: [k]
    best, worst_kept = q[0].new_empty(0), q[0].new_zeros(())
    num_nodes, num_rows = 1, 1

    for layer in range(1, depth + 1):
        drawn, q_drawn = draw_without_replacement(q[-1], max_children, generator)  # [k, c]
        s, child_values = _slot_values(values, q_drawn, predict)
        chosen = (s > worst_kept) & (s >= threshold) & (q_drawn > 0)
        # nonzero() tells the host the layer's width: with the next one, the two waits of a layer.
        row, rank = chosen.nonzero(as_tuple=True)
        if row.shape[0] == 0:
            break
        tokens.append(drawn[row, rank])
        parents.append(nodes[row])
        ranks.append(rank)
        slot_values.append(s[row, rank])
        draft_rows.append(torch.full_like(row, -1))
        best = torch.cat([best, slot_values[-1]])
        if best.shape[0] >= size:
            best = best.topk(size).values
            worst_kept = best[-1]

        layer_values = child_values[row, rank]
        (expanded,) = ((layer_values > worst_kept) & (layer_values >= threshold)).nonzero(as_tuple=True)
        if layer == depth or expanded.shape[0] == 0:
            break
        rows_before = draft_rows[-2]  # of the parents' layer, which starts at node `first_parent`
        first_parent = num_nodes - rows_before.shape[0]
        parent_rows = rows_before[parents[-1][expanded] - first_parent]
        q.append(drafter.expand(tokens[-1][expanded], parent_rows))
        draft_rows[-1][expanded] = torch.arange(num_rows, num_rows + expanded.shape[0], device=device)
        values, nodes = layer_values[expanded], num_nodes + expanded
        num_nodes += row.shape[0]
        num_rows += expanded.shape[0]

    kept, kept_parents = _keep_best(torch.cat(slot_values), torch.cat(parents), size + 1)
    return TokenTree(
        tokens=torch.cat(tokens)[kept],
        parents=kept_parents,
        ranks=torch.cat(ranks)[kept],
        draw="without_replacement",
        draft_rows=torch.cat(draft_rows)[kept],
        draft_probs=torch.cat(q),
    )


def _slot_values(values: Tensor, q_drawn: Tensor, predict: PredictAcceptance) -> tuple[Tensor, Tensor]:
    """S of every slot and V of the child in it, [k, c] each, for V of the parents [k]."""
    mass_before = q_drawn.cumsum(1) - q_drawn
    # Rounding must not leave less than what was drawn, nor 0 to divide by where a row has run out.
    mass_left = torch.maximum(1 - mass_before, q_drawn).clamp_(min=torch.finfo(q_drawn.dtype).tiny)
    acceptance = predict(q_drawn, mass_left)
    rejected = torch.cumprod(1 - acceptance, 1)
    tried = torch.cat([torch.ones_like(rejected[:, :1]), rejected[:, :-1]], 1)
    s = values[:, None] * tried
    return s, s * acceptance


def _keep_best(slot_values: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Numbers of the `count` nodes of largest s, in their old order, and their parents' new numbers."""
    # Stable: where a child's s equals its parent's, the parent, which stands first, is kept first.
    order = slot_values.argsort(descending=True, stable=True)
    kept = order[:count].sort().values
    new_number = torch.full_like(parents, -1)
    new_number[kept] = torch.arange(kept.shape[0], device=parents.device)
    kept_parents = parents[kept]
    return kept, torch.where(kept_parents >= 0, new_number[kept_parents.clamp(min=0)], -1)
