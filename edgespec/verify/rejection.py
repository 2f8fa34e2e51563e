"""Multi-round rejection for children drawn without replacement (DySpec Algorithm 3, SpecInfer, Sequoia).

At a node, for its children in draw order: accept y with probability min(1, p(y)/q(y)); otherwise
p <- norm(max(p - q, 0)), q(y) <- 0, q <- norm(q). If none is accepted, the next token is drawn from p.

Neither vector is normalised here: their sums count, N of the rest of p and m of the rest of q. Both are sums over
the rest, never one minus the rejected mass: where the draft puts all but 1e-14 on one token, such a difference is
rounding error, and the next child would be accepted with any p.
"""

import torch
from torch import Tensor

from edgespec.sampling.draws import draw_one
from edgespec.to_device import on_device
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance, Verification
from edgespec.verify.rows import TargetRows


def verify_rejection(tree: TokenTree, rows: TargetRows, generator: torch.Generator) -> Verification:
    """Try children in the order of their draw; raises ValueError for trees that were not sampled."""
    if tree.draw != "sampled":
        raise ValueError(
            f"multi-round rejection is not lossless for draw '{tree.draw}': "
            "use it with 'sampled', and membership with 'chosen'"
        )
    device = tree.tokens.device
    uniforms = torch.rand(tree.num_nodes, dtype=torch.float64, device=device, generator=generator).tolist()
    # Two waits for the device, for 4n numbers; of p and q only the parts that a visited node needs are read.
    parents, tokens, draft_rows = torch.stack([tree.parents, tree.tokens, tree.draft_rows]).cpu()
    path: list[int] = []
    node = 0
    while True:
        yield node
        children = (parents == node).nonzero().flatten().tolist()  # in draw order
        accepted, residual = _try_children(
            rows.probs(node),
            _draft_rows(tree)[int(draft_rows[node])] if children else None,
            [int(tokens[child]) for child in children],
            [uniforms[child] for child in children],
        )
        if accepted is None:
            return Acceptance(path=tuple(path), next_token=draw_one(residual, generator))
        node = children[accepted]
        path.append(node)


def acceptance_of(residual: Tensor, remaining: Tensor, tokens: Tensor) -> Tensor:
    """Return the chances [k], min(1, p(y)/q(y)), that children of tokens y [k] are accepted.

    `residual` and `remaining` [k, vocab] are the rest of p and of q.
    """
    p = residual.gather(1, tokens[:, None])[:, 0] / residual.sum(1)
    q = remaining.gather(1, tokens[:, None])[:, 0] / remaining.sum(1)
    return (p / q).clamp_(max=1)


def reject(residual: Tensor, remaining: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rest of p and of q, [k, vocab] each, after the children of tokens [k] are rejected.

    Both are in float64 and not normalised. Where nothing would be left of p, it stays: p and q are then equal up to
    rounding, and it is rounding alone that rejects.
    """
    scale = residual.sum(1, keepdim=True) / remaining.sum(1, keepdim=True)  # N / m, [k, 1]
    left = torch.addcmul(residual, remaining, scale, value=-1).clamp_(min=0)
    left = torch.where(left.sum(1, keepdim=True) > 0, left, residual)
    return left, remaining.scatter(1, tokens[:, None], 0.0)


def _draft_rows(tree: TokenTree) -> Tensor:
    if tree.draft_probs is None:
        raise ValueError("multi-round rejection needs the distributions that the children were drawn from")
    return tree.draft_probs


def _try_children(p: Tensor, q: Tensor | None, tokens: list[int], uniforms: list[float]) -> tuple[int | None, Tensor]:
    """Return which of a node's children is accepted, if any, and the distribution [vocab] to draw from if none is.

    p and q are [vocab]; tokens are in draw order. The loop runs over the siblings tried, two or three
    as a rule; each comparison waits for the device, because whether to go on depends on it.
    """
    residual = p.double()[None]  # [1, vocab]
    if q is None:
        return None, residual[0]
    remaining, drawn = q.double()[None], on_device(tokens, p.device)
    for index, uniform in enumerate(uniforms):
        token = drawn[index : index + 1]
        if uniform < float(acceptance_of(residual, remaining, token)):
            return index, residual[0]
        residual, remaining = reject(residual, remaining, token)
    return None, residual[0]
