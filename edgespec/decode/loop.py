"""The loop: grow a tree, look at it with the target, verify, commit. Nothing else.

It knows no policy, model or tokenizer: those come as callables and rooms of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.draft import Drafter
from edgespec.model.target import Target
from edgespec.sampling import draw_one, to_probs
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.rows import Rows, refuse_nan

Grow = Callable[[int, int], TokenTree]  # root token, most layers that can be of use -> tree
Verify = Callable[[TokenTree, Rows, torch.Generator], Acceptance]
Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step added to the text."""

    tokens: tuple[int, ...]  # at least one; none in the first step where the target starts several branches
    num_started: int = 0  # of these, from the front: drawn by the target in the pass before, to start branches
    num_accepted: int = 0  # of these, behind those: nodes that the draft proposed
    num_cached: int = 0  # of the prompt's tokens, in its own step: rows that were there from the text before
    finish: Finish | None  # why the text ends here
    num_drafted: int  # nodes below the root that were verified
    is_prefill: bool  # the first token comes from the pass over the prompt
    grow_s: float
    target_s: float
    rest_s: float  # probabilities, verification, commit

    @property
    def total_s(self) -> float:
        """Of the whole step."""
        return self.grow_s + self.target_s + self.rest_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The parts that live as long as a text: both hold its keys and values, the root's excepted."""

    target: Target
    drafter: Drafter | None  # None: trees are roots only


def decode(
    session: Session,
    prompt: Tensor,
    *,
    grow: Grow,
    verify: Verify,
    sampling: SamplingSettings,
    generator: torch.Generator,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    capacities: tuple[int, int],
) -> Iterator[StepResult]:
    """Continue prompt [n] until a stop token, which is yielded too, or `max_new_tokens` >= 1.

    `capacities` are the rows to make room for in the target's and in the draft's cache. Closing the
    iterator between steps leaves both at the text yielded so far, its last token excepted.
    """
    target_capacity, draft_capacity = capacities
    started = time.perf_counter()
    logits = session.target.prefill(prompt, capacity=target_capacity)
    refuse_nan(logits.amax())
    prefilled = time.perf_counter()
    root = draw_one(to_probs(logits[None], sampling)[0], generator)
    if session.drafter is not None:
        session.drafter.prefill(prompt, capacity=draft_capacity)
    finish = finish_reason(root, stop_tokens, max_new_tokens - 1)
    yield StepResult(
        tokens=(root,),
        finish=finish,
        num_drafted=0,
        is_prefill=True,
        grow_s=0.0,
        target_s=prefilled - started,
        rest_s=time.perf_counter() - prefilled,
    )
    remaining = max_new_tokens - 1
    while finish is None:
        started = time.perf_counter()
        tree = grow(root, remaining - 1)  # the last token needs no node: verification yields it
        grown = time.perf_counter()
        hidden = session.target.look(tree)
        # A wait for the pass to end, as verification would a moment later; so the times are honest.
        refuse_nan(hidden.amax(-1))
        looked = time.perf_counter()
        rows = Rows(hidden, session.target.logits, sampling, vocab=session.target.vocab)
        acceptance = verify(tree, rows, generator)
        path, tokens = _cut_at_stop(tree, acceptance, stop_tokens)
        _commit(session, tree, root, path, tokens)
        root = tokens[-1]
        remaining -= len(tokens)
        finish = finish_reason(root, stop_tokens, remaining)
        yield StepResult(
            tokens=tokens,
            finish=finish,
            num_accepted=min(len(acceptance.path), len(tokens)),
            num_drafted=tree.num_nodes - 1,
            is_prefill=False,
            grow_s=grown - started,
            target_s=looked - grown,
            rest_s=time.perf_counter() - looked,
        )


def finish_reason(token: int, stop_tokens: frozenset[int], remaining: int) -> Finish | None:
    """Why a text ends with this token, if it does."""
    if token in stop_tokens:
        return "stop"
    return "length" if remaining <= 0 else None


def _cut_at_stop(
    tree: TokenTree, acceptance: Acceptance, stop_tokens: frozenset[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The path to commit and the tokens to yield, ended behind the first stop token."""
    path = acceptance.path
    accepted = tree.tokens[torch.tensor(path, dtype=torch.long, device=tree.tokens.device)].tolist()
    tokens = (*accepted, acceptance.next_token)
    for index, token in enumerate(tokens):
        if token in stop_tokens:
            return path[:index], tokens[: index + 1]
    return path, tokens


def _commit(session: Session, tree: TokenTree, root: int, path: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """The only place where committed state changes: the root and the path become text."""
    session.target.commit(path)
    if session.drafter is not None:
        rows = tree.draft_rows[torch.tensor(path, dtype=torch.long, device=tree.tokens.device)].tolist()
        session.drafter.commit(root, rows, list(tokens[: len(path)]))
