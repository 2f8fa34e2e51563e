"""Multi-round rejection for children drawn without replacement (DySpec Algorithm 3, SpecInfer, Sequoia).

At a node, for its children in draw order: accept y with probability min(1, p(y)/q(y)); otherwise
p <- norm(max(p - q, 0)), q(y) <- 0, q <- norm(q). If none is accepted, the next token is drawn from p.

Neither vector has to be updated for that. Let w be one over the draft mass that is left. A rejected
token has p < q, so its residual is 0 and stays 0, and by induction the residual after any number of
rounds is max(p - c*q, 0) / N for one number c, where N is its sum and each round does c <- c + N*w.
So a round costs one sum over the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgespec.sampling import draw_one
from edgespec.tree import TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.rows import Rows


def verify_rejection(tree: TokenTree, rows: Rows, generator: torch.Generator) -> Acceptance:
    """The accepted path; raises ValueError for trees that were not sampled."""
    if tree.draw != "without_replacement":
        raise ValueError(
            f"multi-round rejection is not lossless for draw '{tree.draw}': "
            "use it with 'without_replacement', and membership with 'top_k'"
        )
    device = tree.tokens.device
    uniforms = torch.rand(tree.num_nodes, dtype=torch.float64, device=device, generator=generator).tolist()
    # Two waits for the device, for 4n numbers; of p and q only what a visited node needs is asked for.
    parents, tokens, draft_rows = torch.stack([tree.parents, tree.tokens, tree.draft_rows]).cpu()
    path: list[int] = []
    node = 0
    while True:
        children = (parents == node).nonzero().flatten().tolist()  # in draw order
        accepted, residual = _try_children(
            rows.probs(node),
            tree.draft_probs[int(draft_rows[node])] if children else None,
            [int(tokens[child]) for child in children],
            [uniforms[child] for child in children],
        )
        if accepted is None:
            return Acceptance(path=tuple(path), next_token=draw_one(residual, generator))
        node = children[accepted]
        path.append(node)


def _try_children(p: Tensor, q: Tensor | None, tokens: list[int], uniforms: list[float]) -> tuple[int | None, Tensor]:
    """Which of a node's children is accepted, if any, and the distribution to draw from if none: [vocab].

    p and q are [vocab]; tokens are in draw order. The loop runs over the siblings tried, two or three
    as a rule; each tolist() waits for the device, because whether to go on depends on it.
    """
    scale, total, mass_left = 0.0, 1.0, 1.0  # c, N and the draft mass left, above
    residual = p
    for index, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        assert q is not None
        residual_here, q_here = torch.stack([residual[token], q[token]]).tolist()
        mass_left = max(mass_left, q_here)  # rounding must not leave less than what was drawn
        # p(y)/q(y) of this round: residual / N over q / mass left.
        if uniform * q_here * total < residual_here * mass_left:
            return index, residual
        next_scale = scale + total / mass_left
        next_residual = (p - next_scale * q).clamp_(min=0)
        next_total = float(next_residual.sum())
        if next_total <= 0:
            return index, residual  # p and q are equal up to rounding: nothing is left to reject for
        scale, total, residual = next_scale, next_total, next_residual
        mass_left -= q_here
    return None, residual
