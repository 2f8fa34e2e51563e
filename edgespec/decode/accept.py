"""Every text takes its path down its tree, and makes it part of the text.

Verification asks for one row after the other, because a token says whose row is next. The target's head computes the
rows that all texts ask for at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgespec.copies import on_device
from edgespec.decode.session import AcceptedPath, Session
from edgespec.model.row_chunks import row_chunks, rows_at_once
from edgespec.tree.token_tree import TokenTree
from edgespec.verify.likely import likely_nodes
from edgespec.verify.paths import on_paths
from edgespec.verify.rows import RowNeededError, TargetRows, not_finite


@dataclass(slots=True)
class _Verification:
    """A text whose tree is being verified."""

    session: Session
    tree: TokenTree
    rows: TargetRows
    drawn_from: Tensor  # the state of the text's generator before


def accept_together(
    trees: Sequence[tuple[Session, TokenTree]], hidden: Sequence[Tensor], is_finite: Sequence[bool]
) -> tuple[list[tuple[Session, TokenTree, AcceptedPath]], list[tuple[Session, Exception]]]:
    """Let every text take its path, and return what each gained, and what went wrong with others.

    The target's head computes the rows that all texts ask for at once. A text's verification is then made again, up
    to where it lacks the next row: it depends on nothing but these rows and the generator, which goes back.
    """
    gained: list[tuple[Session, TokenTree, AcceptedPath]] = []
    failed: list[tuple[Session, Exception]] = []
    under_way: list[_Verification] = []
    for (session, tree), states, is_number in zip(trees, hidden, is_finite, strict=False):
        if not is_number:
            failed.append((session, not_finite()))
            continue
        rows = TargetRows(
            states,
            session.target.logits,
            session.settings.sampling,
            vocab=session.target.vocab,
            waits=len(trees) > 1,
            likely=likely_nodes(tree, max(1, rows_at_once(session.target.vocab) // len(trees))),
            process=None if session.processors is None else on_paths(session.processors, tree),
        )
        under_way.append(_Verification(session, tree, rows, session.generator.get_state()))
    while under_way:
        asking: list[tuple[_Verification, int]] = []
        for text in under_way:
            try:
                accepted = _with_logprobs(text, text.session.rules.accept(text.session, text.tree, text.rows))
                commit(text.session, text.tree, accepted)
            except RowNeededError as needed:
                text.session.generator.set_state(text.drawn_from)
                asking.append((text, needed.node))
            except Exception as error:  # of this text alone: the others go on
                failed.append((text.session, error))
            else:
                gained.append((text.session, text.tree, accepted))
        under_way = [text for text, _ in asking]
        try:
            _compute_rows(asking)
        except Exception as error:
            if not gained:
                raise  # no text has changed
            failed += [(text.session, error) for text in under_way]
            break
    return gained, failed


def _with_logprobs(text: _Verification, accepted: AcceptedPath) -> AcceptedPath:
    """Return the path with what the model says of its tokens, where that was asked for."""
    count = text.session.settings.num_logprobs
    if count is None:
        return accepted
    return replace(accepted, logprobs=text.rows.logprobs((0, *accepted.path), accepted.tokens, count))


def _compute_rows(asking: Sequence[tuple[_Verification, int]]) -> None:
    """Compute the logits of the nodes that texts ask for, and of those that they are likely to ask for next."""
    if not asking:
        return
    target = asking[0][0].session.target
    wanted = [(text.rows, node) for text, first in asking for node in text.rows.beside(first)]
    for chunk in row_chunks(len(wanted), target.vocab):
        logits = target.logits(torch.cat([rows.hidden([node]) for rows, node in wanted[chunk]]))
        for (rows, node), row in zip(wanted[chunk], logits.split(1), strict=True):
            rows.know(node, row)


def commit(session: Session, tree: TokenTree, accepted: AcceptedPath) -> None:
    """Make the root and the accepted path part of the text; committed state changes nowhere else."""
    path = accepted.path
    session.target.commit(path)
    if session.drafter is not None:
        rows = tree.draft_rows[on_device(path, tree.tokens.device)].tolist()
        session.drafter.commit(session.root, rows, list(accepted.tokens[: len(path)]))
    session.add(accepted.tokens)
