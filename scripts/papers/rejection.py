"""Is multi-round rejection exact where the draft is sure? One node, four children, drafts sure by more and more nats.

    python -m scripts.papers.rejection

A vocabulary of six tokens; target and draft are random, and the draft puts one token --gaps nats above its own logit.
The node's children are drawn without replacement, verification accepts one or draws another token, and what comes out
is compared with the target's own distribution: chi-square on 5 degrees of freedom (11 is exceeded once in 20 right
runs, 20 once in 800) and total variation, of which sampling alone makes some 0.005. Prints a line a format and gap and
one JSON line; exits 1 where the p-value is below --bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from edgespec.sampling.draws import draw_without_replacement
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import accept_alone
from edgespec.verify.rejection import verify_rejection

VOCAB = 6
NUM_CHILDREN = 4
SURE = 2  # the token that the draft is sure of


def pair(gap: float, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """The target's p and the draft's q: [vocab] each."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[1, SURE] += gap
    p, q = logits.to(dtype).softmax(-1)
    return p, q


def yielded(p: Tensor, q: Tensor, *, count: int, seed: int) -> Tensor:
    """How often each token came out of the node: [vocab]."""
    generator = torch.Generator().manual_seed(seed)
    drawn, q_drawn = draw_without_replacement(q.expand(count, VOCAB), NUM_CHILDREN, generator)
    # The node is asked for its p; a child that was accepted has none of its own, and says so.
    rows: Any = SimpleNamespace(probs=lambda node: p if node == 0 else after)
    after = torch.nn.functional.one_hot(torch.tensor(0), VOCAB).to(p.dtype)
    counts = torch.zeros(VOCAB, dtype=torch.long)
    for tokens, probs in zip(drawn, q_drawn, strict=True):
        children = tokens[probs > 0]
        tree = TokenTree(
            tokens=torch.cat([torch.zeros(1, dtype=torch.long), children]),
            parents=torch.tensor([-1, *[0] * len(children)]),
            ranks=torch.tensor([0, *range(len(children))]),
            draw="sampled",
            draft_rows=torch.tensor([0, *[-1] * len(children)]),
            draft_probs=q[None],
        )
        acceptance = accept_alone(verify_rejection(tree, rows, generator))
        counts[int(tree.tokens[acceptance.path[0]]) if acceptance.path else acceptance.next_token] += 1
    return counts


def main() -> int:
    """Every format and gap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaps", type=float, nargs="+", default=[0, 8, 14, 17, 20, 40])
    parser.add_argument("-n", "--draws", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bound", type=float, default=1e-4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).split(".")[1]
        for gap in arguments.gaps:
            p, q = pair(gap, dtype, arguments.seed)
            counts = yielded(p, q, count=arguments.draws, seed=1000 * arguments.seed + int(gap)).double()
            law = p.double() / p.double().sum()
            chi, p_value = stats.chisquare(counts, law * arguments.draws, sum_check=False)
            variation = float((counts / arguments.draws - law).abs().sum() / 2)
            found.append({"dtype": name, "gap": gap, "chi_square": float(chi), "p_value": float(p_value),
                          "total_variation": variation})  # fmt: skip
            print(f"{name:8} gap {gap:>3g}: chi-square {chi:>8.1f}, p {p_value:.2g}, total variation {variation:.4f}",
                  flush=True)  # fmt: skip
    print(json.dumps({"draws": arguments.draws, "seed": arguments.seed, "rows": found}))
    return 0 if all(row["p_value"] > arguments.bound for row in found) else 1  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
