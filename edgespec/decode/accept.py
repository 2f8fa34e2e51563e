"""Every text takes its path down its tree, and then makes it part of the text.

Verification yields one node after the other, because a token says whose row is next. The target's head computes the
rows that all texts lack at once.
"""

import itertools
from collections import abc
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from edgespec.decode.sequence import AcceptedPath, Sequence
from edgespec.machine.torch_threads import torch_threads
from edgespec.model.row_chunks import row_chunks, rows_at_once
from edgespec.to_device import on_device
from edgespec.tree.token_tree import TokenTree, all_on_path
from edgespec.verify.near_ties import MOST_UNREAD
from edgespec.verify.paths import on_paths
from edgespec.verify.rows import TargetRows, not_finite

MIN_CHANCE = 0.2  # of a node to be visited: below it, a read of the head for it alone costs less in the mean
MAX_NODES = 16


def likely_nodes(tree: TokenTree, most: int = MAX_NODES) -> tuple[int, ...]:
    """Return the nodes that are likely to be visited, likeliest first, up to the given number.

    A token says whose row is next, and yet most paths stay among a tree's best nodes; a head of a large vocabulary is
    read as fast for a few rows as for one. Chances are the scores that the tree was grown by. Where there are none, the
    first children of first children are taken to be likely. This waits for the device.
    """
    if tree.num_nodes == 1:
        return (0,)
    chances = all_on_path(tree.ranks == 0, tree.parents).double() if tree.scores is None else tree.scores
    best = chances.topk(min(most, tree.num_nodes))
    return tuple(best.indices[best.values >= MIN_CHANCE].tolist())


AcceptedTree: TypeAlias = tuple[Sequence, TokenTree, AcceptedPath]
Failed: TypeAlias = tuple[Sequence, Exception]


@dataclass(frozen=True, slots=True)
class _Walk:
    """A text on the way down its tree."""

    sequence: Sequence
    rows: TargetRows
    likely: tuple[int, ...]  # nodes whose rows are computed beside others
    nodes: abc.Iterator[int]  # whose rows are lacking
    most: int = MAX_NODES  # rows at once
    is_alone: bool = False  # whether the only row has plain decoding's bits, which the head is to keep

    def beside(self, node: int) -> list[int]:
        """Return a node whose row is lacking, and others whose rows are computed with it."""
        others = (other for other in self.likely if other != node and not self.rows.knows(other))
        return [node, *itertools.islice(others, self.most - 1)]


def accept_batched(
    trees: abc.Sequence[tuple[Sequence, TokenTree]], hidden: abc.Sequence[Tensor], is_finite: abc.Sequence[bool]
) -> tuple[list[AcceptedTree], list[Failed]]:
    """Return the path that every text takes, and what went wrong with others; no text has changed by then."""
    accepted: list[AcceptedTree] = []
    failed: list[Failed] = []
    walks: list[_Walk] = []
    for (sequence, tree), states, is_number in zip(trees, hidden, is_finite, strict=False):
        if is_number:
            walks.append(_walk(sequence, tree, states, accepted, trees))
        else:
            failed.append((sequence, not_finite()))
    while walks:
        lacking: list[tuple[_Walk, int]] = []
        # Several would gain little, wait for each other beside other programs, and sum a row in another order.
        with torch_threads(1):
            for walk in walks:
                try:
                    node = next(walk.nodes, None)
                except Exception as error:  # of this text alone: the others go on
                    failed.append((walk.sequence, error))
                else:
                    lacking += [] if node is None else [(walk, node)]
        _compute_rows(lacking)
        walks = [walk for walk, _ in lacking]
    return accepted, failed


def commit(accepted: abc.Sequence[AcceptedTree]) -> tuple[list[AcceptedTree], list[Failed]]:
    """Make paths part of their texts, and return those that are, and what went wrong with others."""
    gained: list[AcceptedTree] = []
    failed: list[Failed] = []
    for sequence, tree, path in accepted:
        try:
            _commit(sequence, tree, path)
        except Exception as error:  # of this text alone: the others go on
            failed.append((sequence, error))
        else:
            gained.append((sequence, tree, path))
    return gained, failed


def tokens_at(tree: TokenTree, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of some nodes: a handful, fetched after verification has waited for the pass."""
    return tuple(tree.tokens[on_device(nodes, tree.tokens.device)].tolist()) if nodes else ()


def _walk(
    sequence: Sequence,
    tree: TokenTree,
    states: Tensor,
    accepted: list[AcceptedTree],
    trees: abc.Sequence[tuple[Sequence, TokenTree]],
) -> _Walk:
    rows = TargetRows(
        states,
        sequence.target.logits,
        sequence.settings.sampling,
        vocab=sequence.target.vocab,
        process=None if sequence.processors is None else on_paths(sequence.processors, tree),
    )
    is_alone = sequence.near_ties is not None and tree.num_nodes == 1 and sequence.target.is_exact
    if sequence.near_ties is not None and not is_alone:
        rows.is_near_tie = _near_ties_of(sequence, rows, num_rows=sum(one.num_nodes for _, one in trees))
    return _Walk(
        sequence,
        rows,
        likely=likely_nodes(tree, tree.num_nodes),
        most=min(MAX_NODES, max(1, rows_at_once(sequence.target.vocab) // len(trees))),
        is_alone=is_alone,
        nodes=(node for node in _take_path(sequence, tree, rows, accepted) if not rows.knows(node)),
    )


def _near_ties_of(sequence: Sequence, rows: TargetRows, *, num_rows: int) -> abc.Callable[[int, int, int], bool]:
    """Return whether the token after a node may be another one by plain decoding's row; nodes are asked in order."""
    ties, sampling, target = sequence.near_ties, sequence.settings.sampling, sequence.target
    assert ties is not None

    def is_near(node: int, depth: int, token: int) -> bool:
        if target.num_inexact + depth + 1 >= MOST_UNREAD:
            return True
        e_to_g = None if sampling.temperature == 0 else sequence.noise.below(depth + 1)
        return ties.is_near(rows.logits(node), token, sampling, e_to_g, num_rows=num_rows)

    return is_near


def _take_path(
    sequence: Sequence, tree: TokenTree, rows: TargetRows, accepted: list[AcceptedTree]
) -> abc.Iterator[int]:
    """Yield the nodes whose rows verification reads; at its end the path, up to a stop token, is among the accepted."""
    acceptance = yield from sequence.verify(tree, rows, sequence.generator)
    proposed = tokens_at(tree, acceptance.path)
    tokens = (*proposed, acceptance.next_token)
    stops, count = sequence.settings.stop_tokens, sequence.settings.num_logprobs
    stop = next((index for index, token in enumerate(tokens) if token in stops), len(proposed))
    is_looked_up = [tree.looked_up is not None and tree.looked_up[node] for node in acceptance.path] + [False]
    is_open = acceptance.is_near_tie and stop == len(proposed)
    path, tokens = acceptance.path[:stop], tokens[: stop + 1]
    found = AcceptedPath(
        path=path,
        tokens=tokens,
        from_draft=tuple(index < len(proposed) for index in range(len(tokens))),
        from_lookup=tuple(is_looked_up[: len(tokens)]),
        logprobs=() if count is None else rows.logprobs((0, *path), tokens, count),
        open_rows=rows if is_open else None,
    )
    accepted.append((sequence, tree, found))


def _compute_rows(lacking: abc.Sequence[tuple[_Walk, int]]) -> None:
    """Compute the logits of the nodes that texts lack, and of those that they are likely to read next."""
    alone = [(walk, node) for walk, node in lacking if walk.is_alone]
    for walk, node in alone:
        walk.rows.know(node, walk.sequence.target.logits(walk.rows.hidden([node])))
    lacking = [(walk, node) for walk, node in lacking if not walk.is_alone]
    if not lacking:
        return
    target = lacking[0][0].sequence.target
    nodes_of = [(walk.rows, walk.beside(first)) for walk, first in lacking]
    nodes = [(rows, node) for rows, beside in nodes_of for node in beside]
    of_texts = [walk.sequence.target.adapters for walk, _ in lacking]
    adapters = [own for own, (_, beside) in zip(of_texts, nodes_of, strict=True) for _ in beside]
    hidden = torch.cat([rows.hidden(beside) for rows, beside in nodes_of])
    for chunk in row_chunks(len(nodes), target.vocab):
        runs = [(own, 1) for own in adapters[chunk]] if any(of_texts) else ()
        for (rows, node), row in zip(nodes[chunk], target.logits(hidden[chunk], runs).split(1), strict=True):
            rows.know(node, row)


def _commit(sequence: Sequence, tree: TokenTree, accepted: AcceptedPath) -> None:
    """Make the root and the accepted path part of the text; committed state changes nowhere else."""
    path = accepted.path
    if not accepted.num_read_again:  # else they are text already
        sequence.target.commit(path)
    if sequence.drafter is not None:
        rows = [-1] * len(path)
        if sequence.has_drafted:
            rows = tree.draft_rows[on_device(path, tree.tokens.device)].tolist()
        sequence.drafter.commit(sequence.root, rows, list(accepted.tokens[: len(path)]))
    sequence.add(accepted.tokens)
