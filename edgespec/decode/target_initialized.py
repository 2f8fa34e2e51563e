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
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from edgespec.decode.loop import AcceptedPath, commit, look, tokens_at
from edgespec.decode.session import Session
from edgespec.decode.step import StepResult
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.draws import draw_without_replacement
from edgespec.tree.token_tree import TokenTree, ancestors_mask
from edgespec.verify.rows import TargetRows, refuse_nan


def decode_target_initialized(session: Session, prompt: Tensor, *, width: int) -> Iterator[StepResult]:
    """Continue prompt [n] as `decode` does, in branches that begin with `width` tokens of the target's.

    The first step yields no token, because the first branches are drawn there.
    """
    assert session.drafter is not None
    target_rows, draft_rows = session.settings.cache_rows
    started = time.perf_counter()
    logits = session.target.prefill(prompt, capacity=target_rows)
    refuse_nan(logits.amax(-1))
    prefilled = time.perf_counter()
    session.noise.start(prompt.shape[0] - 1)
    session.target.uncommit_last()
    session.drafter.prefill(prompt[:-1], capacity=draft_rows)
    branches = _draw(to_probs(logits[None], session.settings.sampling), width, session.generator)
    session.root = int(prompt[-1])
    yield StepResult(
        tokens=(),
        finish=None,
        num_drafted=0,
        is_prefill=True,
        grow_s=0.0,
        target_s=prefilled - started,
        rest_s=time.perf_counter() - prefilled,
    )
    while session.finish is None:
        started = time.perf_counter()
        tree = session.grow(session.root, session.num_left, branches)
        grown = time.perf_counter()
        rows = look(session, tree)
        looked = time.perf_counter()
        path, end_token = _longest(session, tree, rows)
        branches = _branches_after(rows.probs(path[-1]), end_token, width, session.generator)
        tokens = _until_stop(tokens_at(tree, path), session.settings.stop_tokens)[: session.num_left]
        num_proposed = len(tokens) - 1
        commit(session, tree, AcceptedPath(path=path[:num_proposed], tokens=tokens, num_proposed=num_proposed))
        yield StepResult(
            tokens=tokens,
            num_started=1,
            num_accepted=num_proposed,
            finish=session.finish,
            num_drafted=tree.num_nodes - 1,
            is_prefill=False,
            grow_s=grown - started,
            target_s=looked - grown,
            rest_s=time.perf_counter() - looked,
        )


def _until_stop(tokens: tuple[int, ...], stop_tokens: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens up to the first that ends the text, that one included."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_tokens), len(tokens))
    return tokens[:end]


def _longest(session: Session, tree: TokenTree, rows: TargetRows) -> tuple[tuple[int, ...], int]:
    """Return the longest accepted path, its branch's first token included, and the token drawn at its end."""
    ancestors = ancestors_mask(tree.parents)
    best: tuple[tuple[int, ...], int] = ((), -1)
    for branch in (tree.parents == 0).nonzero().flatten().tolist():  # w, two or three
        nodes = ancestors[:, branch].nonzero().flatten()
        acceptance = session.verify(_subtree(tree, nodes), rows.of(nodes), session.generator)
        path = (branch, *nodes[torch.tensor(acceptance.path, dtype=torch.long, device=nodes.device)].tolist())
        if len(path) > len(best[0]):
            best = (path, acceptance.next_token)
    return best


def _subtree(tree: TokenTree, nodes: Tensor) -> TokenTree:
    """Return the tree of some nodes [k], ascending, of which the first is the root."""
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
    """Draw distinct tokens of p [1, vocab]: [w], fewer where p has fewer."""
    tokens, probs = draw_without_replacement(p, width, generator)
    return tokens[0, probs[0] > 0]


def _branches_after(p: Tensor, first: int, width: int, generator: torch.Generator) -> Tensor:
    """Return the token that verification drew, and `width` - 1 others drawn from p [vocab]."""
    others = p.clone()
    others[first] = 0
    return torch.cat([torch.tensor([first], device=p.device), _draw(others[None], width - 1, generator)])
