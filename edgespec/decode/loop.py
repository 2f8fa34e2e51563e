"""A step in four verbs: propose a tree, look at it with the target, accept a path, commit it.

It knows no policy, model or tokenizer: those come with the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.decode.session import Session
from edgespec.decode.step import StepResult
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.draws import draw_one
from edgespec.tree.token_tree import TokenTree
from edgespec.verify.rows import TargetRows, refuse_nan


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """What a text gains by a step."""

    path: tuple[int, ...]  # nodes below the root whose rows become text's
    tokens: tuple[int, ...]  # of these nodes, and one more: the next root
    num_proposed: int  # of the tokens, those that are the draft's


def decode(session: Session, prompt: Tensor) -> Iterator[StepResult]:
    """Continue prompt [n] until a stop token, which is yielded too, or until the text is as long as it may be.

    Closing the iterator between steps leaves both caches at the text yielded so far, its last token excepted.
    """
    yield begin(session, prompt)
    while session.finish is None:
        started = time.perf_counter()
        tree = propose(session)
        grown = time.perf_counter()
        rows = look(session, tree)
        looked = time.perf_counter()
        accepted = accept(session, tree, rows)
        commit(session, tree, accepted)
        step = StepResult(
            tokens=accepted.tokens,
            finish=session.finish,
            num_accepted=accepted.num_proposed,
            num_drafted=tree.num_nodes - 1,
            path=accepted.path,
            is_prefill=False,
            grow_s=grown - started,
            target_s=looked - grown,
            rest_s=time.perf_counter() - looked,
        )
        session.learn(step)
        yield step


def begin(session: Session, prompt: Tensor) -> StepResult:
    """Read the prompt [n] with both models, draw the first token, and return the step that this makes."""
    target_rows, draft_rows = session.settings.cache_rows
    started = time.perf_counter()
    logits = session.target.prefill(prompt, capacity=target_rows)
    refuse_nan(logits.amax())
    prefilled = time.perf_counter()
    session.noise.start(prompt.shape[0] - 1)
    session.add((_first_token(session, to_probs(logits[None], session.settings.sampling)[0]),))
    if session.drafter is not None:
        session.drafter.prefill(prompt, capacity=draft_rows)
    return StepResult(
        tokens=(session.root,),
        finish=session.finish,
        num_drafted=0,
        is_prefill=True,
        grow_s=0.0,
        target_s=prefilled - started,
        rest_s=time.perf_counter() - prefilled,
    )


def _first_token(session: Session, p: Tensor) -> int:
    return session.noise.draw(p, 1) if session.draws_coupled else draw_one(p, session.generator)


def propose(session: Session) -> TokenTree:
    """Grow a tree below the root; the text's last token needs no node, for verification yields it."""
    return session.grow(session.root, session.num_left - 1)


def look(session: Session, tree: TokenTree) -> TargetRows:
    """Read the tree with the target, in one pass over its weights, and wait for the pass to end."""
    hidden = session.target.look(tree)
    # Verification would wait a moment later: so the times are honest.
    refuse_nan(hidden.amax(-1))
    return TargetRows(hidden, session.target.logits, session.settings.sampling, vocab=session.target.vocab)


def accept(session: Session, tree: TokenTree, rows: TargetRows) -> AcceptedPath:
    """Verify the tree, and return the path that the text takes, ended at the first stop token."""
    acceptance = session.verify(tree, rows, session.generator)
    proposed = tokens_at(tree, acceptance.path)
    tokens = (*proposed, acceptance.next_token)
    stop = next((index for index, token in enumerate(tokens) if token in session.settings.stop_tokens), len(proposed))
    return AcceptedPath(
        path=acceptance.path[:stop], tokens=tokens[: stop + 1], num_proposed=min(len(proposed), stop + 1)
    )


def commit(session: Session, tree: TokenTree, accepted: AcceptedPath) -> None:
    """Make the root and the accepted path part of the text; committed state changes nowhere else."""
    path = accepted.path
    session.target.commit(path)
    if session.drafter is not None:
        rows = tree.draft_rows[torch.tensor(path, dtype=torch.long, device=tree.tokens.device)].tolist()
        session.drafter.commit(session.root, rows, list(accepted.tokens[: len(path)]))
    session.add(accepted.tokens)


def tokens_at(tree: TokenTree, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of some nodes: a handful, fetched after verification has waited for the pass."""
    return tuple(tree.tokens[torch.tensor(nodes, dtype=torch.long, device=tree.tokens.device)].tolist())
