"""Target-initialised trees: the target starts w branches, and the longest accepted one wins. LOSSY for w > 1.

Source: Improving-MCSD, section 3.1. After a pass the target's distribution is known where the accepted
path ends. Instead of one token, w are drawn from it, and each starts a branch of the next tree. Taking
the branch that was accepted furthest favours tokens that are easy to continue: the output has no
longer the target's distribution.

The last token of the path stays uncommitted and is the root of the next tree, whose children are the
w tokens; so trees, masks and caches are those of every other policy, for one row more a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode.loop import Session, StepResult, Verify, finish_reason
from edgespec.sampling import draw_without_replacement, to_probs
from edgespec.tree.token_tree import TokenTree, ancestors_mask
from edgespec.verify.rows import Rows, refuse_nan

GrowBranches = Callable[[int, int, Tensor], TokenTree]  # root token, most layers, its children [w] -> tree


def decode_target_initialized(
    session: Session,
    prompt: Tensor,
    *,
    grow: GrowBranches,
    verify: Verify,
    sampling: SamplingSettings,
    generator: torch.Generator,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    capacities: tuple[int, int],
    width: int,
) -> Iterator[StepResult]:
    """Continue prompt [n] as `decode` does, in branches of `width` tokens of the target's.

    The first step yields no token: the first branches are drawn there.
    """
    assert session.drafter is not None
    started = time.perf_counter()
    logits = session.target.prefill(prompt, capacity=capacities[0])
    refuse_nan(logits.amax(-1))
    prefilled = time.perf_counter()
    session.target.uncommit_last()
    session.drafter.prefill(prompt[:-1], capacity=capacities[1])
    branches = _draw(to_probs(logits[None], sampling), width, generator)
    root, remaining = int(prompt[-1]), max_new_tokens
    yield StepResult(
        tokens=(),
        finish=None,
        num_drafted=0,
        is_prefill=True,
        grow_s=0.0,
        target_s=prefilled - started,
        rest_s=time.perf_counter() - prefilled,
    )
    while True:
        started = time.perf_counter()
        tree = grow(root, remaining, branches)
        grown = time.perf_counter()
        hidden = session.target.look(tree)
        refuse_nan(hidden.amax(-1))
        looked = time.perf_counter()
        path, end_token = _longest(session, tree, hidden, sampling, verify, generator)
        tokens = _until_stop(tree.tokens[torch.tensor(path, device=tree.tokens.device)].tolist(), stop_tokens)[
            :remaining
        ]
        rows = Rows(hidden, session.target.logits, sampling, vocab=session.target.vocab)
        branches = _branches_after(rows.probs(path[-1]), end_token, width, generator)
        kept = path[: len(tokens) - 1]
        session.target.commit(kept)
        session.drafter.commit(root, [int(tree.draft_rows[node]) for node in kept], list(tokens[:-1]))
        root = tokens[-1]
        remaining -= len(tokens)
        finish = finish_reason(root, stop_tokens, remaining)
        yield StepResult(
            tokens=tokens,
            num_started=1,
            num_accepted=len(tokens) - 1,
            finish=finish,
            num_drafted=tree.num_nodes - 1,
            is_prefill=False,
            grow_s=grown - started,
            target_s=looked - grown,
            rest_s=time.perf_counter() - looked,
        )
        if finish is not None:
            return


def _until_stop(tokens: list[int], stop_tokens: frozenset[int]) -> tuple[int, ...]:
    """The tokens up to the first that ends the text, that one included."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_tokens), len(tokens))
    return tuple(tokens[:end])


def _longest(
    session: Session,
    tree: TokenTree,
    hidden: Tensor,
    sampling: SamplingSettings,
    verify: Verify,
    generator: torch.Generator,
) -> tuple[tuple[int, ...], int]:
    """The longest accepted path, its branch's first token included, and the token drawn at its end."""
    ancestors = ancestors_mask(tree.parents)
    best: tuple[tuple[int, ...], int] = ((), -1)
    for branch in (tree.parents == 0).nonzero().flatten().tolist():  # w, two or three
        nodes = ancestors[:, branch].nonzero().flatten()
        rows = Rows(hidden[nodes], session.target.logits, sampling, vocab=session.target.vocab)
        acceptance = verify(_subtree(tree, nodes), rows, generator)
        path = (branch, *nodes[torch.tensor(acceptance.path, dtype=torch.long, device=nodes.device)].tolist())
        if len(path) > len(best[0]):
            best = (path, acceptance.next_token)
    return best


def _subtree(tree: TokenTree, nodes: Tensor) -> TokenTree:
    """The tree of some nodes [k], ascending, of which the first is the root."""
    number = torch.full_like(tree.parents, -1)
    number[nodes] = torch.arange(nodes.shape[0], device=nodes.device)
    parents = number[tree.parents[nodes]]
    parents[0] = -1
    return replace(
        tree,
        tokens=tree.tokens[nodes],
        parents=parents,
        ranks=tree.ranks[nodes],
        draft_rows=tree.draft_rows[nodes],
        ancestors=None,
    )


def _draw(p: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Distinct tokens of p [1, vocab]: [w], fewer where p has fewer."""
    tokens, probs = draw_without_replacement(p, width, generator)
    return tokens[0, probs[0] > 0]


def _branches_after(p: Tensor, first: int, width: int, generator: torch.Generator) -> Tensor:
    """The token that verification drew, and `width` - 1 others of p [vocab]."""
    others = p.clone()
    others[first] = 0
    return torch.cat([torch.tensor([first], device=p.device), _draw(others[None], width - 1, generator)])
