"""Every text takes its path down its tree, and makes it part of the text.

Verification asks for one row after the other, because a token says whose row is next. The target's head computes the
rows that all texts ask for at once.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgespec.copies import on_device
from edgespec.decode.sequence import AcceptedPath, Sequence
from edgespec.model.row_chunks import row_chunks, rows_at_once
from edgespec.tree.token_tree import TokenTree
from edgespec.verify.likely import likely_nodes
from edgespec.verify.paths import on_paths
from edgespec.verify.rows import RowNeededError, TargetRows, not_finite


@dataclass(slots=True)
class _Verification:
    """A text whose tree is being verified."""

    sequence: Sequence
    tree: TokenTree
    rows: TargetRows
    drawn_from: Tensor  # the state of the text's generator before


def accept_batched(
    trees: abc.Sequence[tuple[Sequence, TokenTree]], hidden: abc.Sequence[Tensor], is_finite: abc.Sequence[bool]
) -> tuple[list[tuple[Sequence, TokenTree, AcceptedPath]], list[tuple[Sequence, Exception]]]:
    """Let every text take its path, and return what each gained, and what went wrong with others.

    The target's head computes the rows that all texts ask for at once. A text's verification is then made again, up
    to where it lacks the next row: it depends on nothing but these rows and the generator, which goes back.
    """
    gained: list[tuple[Sequence, TokenTree, AcceptedPath]] = []
    failed: list[tuple[Sequence, Exception]] = []
    under_way: list[_Verification] = []
    for (sequence, tree), states, is_number in zip(trees, hidden, is_finite, strict=False):
        if not is_number:
            failed.append((sequence, not_finite()))
            continue
        rows = TargetRows(
            states,
            sequence.target.logits,
            sequence.settings.sampling,
            vocab=sequence.target.vocab,
            waits=len(trees) > 1,
            likely=likely_nodes(tree, max(1, rows_at_once(sequence.target.vocab) // len(trees))),
            process=None if sequence.processors is None else on_paths(sequence.processors, tree),
        )
        under_way.append(_Verification(sequence, tree, rows, sequence.generator.get_state()))
    while under_way:
        asking: list[tuple[_Verification, int]] = []
        for text in under_way:
            try:
                accepted = _with_logprobs(text, text.sequence.rules.accept(text.sequence, text.tree, text.rows))
                commit(text.sequence, text.tree, accepted)
            except RowNeededError as needed:
                text.sequence.generator.set_state(text.drawn_from)
                asking.append((text, needed.node))
            except Exception as error:  # of this text alone: the others go on
                failed.append((text.sequence, error))
            else:
                gained.append((text.sequence, text.tree, accepted))
        under_way = [text for text, _ in asking]
        try:
            _compute_rows(asking)
        except Exception as error:
            if not gained:
                raise  # no text has changed
            failed += [(text.sequence, error) for text in under_way]
            break
    return gained, failed


def _with_logprobs(text: _Verification, accepted: AcceptedPath) -> AcceptedPath:
    """Return the path with what the model says of its tokens, where that was asked for."""
    count = text.sequence.settings.num_logprobs
    if count is None:
        return accepted
    return replace(accepted, logprobs=text.rows.logprobs((0, *accepted.path), accepted.tokens, count))


def _compute_rows(asking: abc.Sequence[tuple[_Verification, int]]) -> None:
    """Compute the logits of the nodes that texts ask for, and of those that they are likely to ask for next."""
    if not asking:
        return
    target = asking[0][0].sequence.target
    wanted = [(text.rows, node) for text, first in asking for node in text.rows.beside(first)]
    for chunk in row_chunks(len(wanted), target.vocab):
        logits = target.logits(torch.cat([rows.hidden([node]) for rows, node in wanted[chunk]]))
        for (rows, node), row in zip(wanted[chunk], logits.split(1), strict=True):
            rows.know(node, row)


def commit(sequence: Sequence, tree: TokenTree, accepted: AcceptedPath) -> None:
    """Make the root and the accepted path part of the text; committed state changes nowhere else."""
    path = accepted.path
    sequence.target.commit(path)
    if sequence.drafter is not None:
        rows = tree.draft_rows[on_device(path, tree.tokens.device)].tolist()
        sequence.drafter.commit(sequence.root, rows, list(accepted.tokens[: len(path)]))
    sequence.add(accepted.tokens)
