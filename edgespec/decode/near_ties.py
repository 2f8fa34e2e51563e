"""Texts whose next token is a near tie are read again as plain decoding reads them, and that row decides.

A near tie ends a text's path. Its rows that were read among others, those of the path included, are dropped and read
row by row, of all such texts in one pass; the last row has plain decoding's bits, and so have the text's rows from then
on. A layer that streams comes once for all of them.
"""

from collections import abc
from dataclasses import replace

import torch
from torch import Tensor

from edgespec.decode.accept import AcceptedTree, Failed
from edgespec.decode.sequence import Sequence
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.to_device import on_device
from edgespec.verify.rows import TargetRows, refuse_nan


def decide_near_ties(accepted: abc.Sequence[AcceptedTree], *, num_rows: int) -> tuple[list[AcceptedTree], list[Failed]]:
    """Return all paths, with the tokens of near ties decided, whose texts have their rows; and what went wrong.

    The trees passed among `num_rows`.
    """
    open_texts = [(sequence, path.path) for sequence, _, path in accepted if path.open_rows is not None]
    if not open_texts:
        return list(accepted), []
    num_read, last = _read_exactly(open_texts)
    decided: list[AcceptedTree] = []
    failed: list[Failed] = []
    for sequence, tree, path in accepted:
        if path.open_rows is None:
            decided.append((sequence, tree, path))
            continue
        try:
            logits = _compare(sequence, path.open_rows, (0, *path.path), last[sequence], num_rows=num_rows)
            token, logprobs = _decide(sequence, path.open_rows, path.path, logits)
        except Exception as error:  # of this text alone: the others go on
            failed.append((sequence, error))
            continue
        found = replace(
            path, tokens=(*path.tokens[:-1], token), logprobs=path.logprobs[:-1] + logprobs,
            num_read_again=num_read[sequence], turned=token != path.tokens[-1],
        )  # fmt: skip
        decided.append((sequence, tree, found))
    return decided, failed


def _read_exactly(
    texts: abc.Sequence[tuple[Sequence, tuple[int, ...]]],
) -> tuple[dict[Sequence, int], dict[Sequence, Tensor]]:
    """Read texts up to the ends of their paths; return how many rows of each, and the last ones' hidden states."""
    for sequence, path in texts:
        sequence.target.begin_exactly(path)
    num_read = {sequence: sequence.target.num_unread for sequence, _ in texts}
    last: dict[Sequence, Tensor] = {}
    unread = [sequence for sequence, _ in texts]
    while unread:
        parts = [sequence.target.exact_rows() for sequence in unread]
        for sequence, part, hidden in zip(unread, parts, unread[0].target.read(parts), strict=True):
            sequence.target.took_in(part.count)
            last[sequence] = hidden
        unread = [sequence for sequence in unread if sequence.target.num_unread]
    return num_read, last


def _compare(
    sequence: Sequence, rows: TargetRows, nodes: abc.Sequence[int], hidden: Tensor, *, num_rows: int
) -> Tensor:
    """Return the logits [1, vocab] of the last row, and let near ties learn from the rows of nodes, read twice."""
    assert sequence.near_ties is not None
    alone = [sequence.target.logits(row) for row in hidden[-len(nodes) :].split(1)]
    refuse_nan(torch.cat([row.amax(-1) for row in alone]))
    known = nodes[len(nodes) - len(alone) :]
    among = torch.cat([rows.own_logits(node) for node in known])
    sequence.near_ties.learn(among, torch.cat(alone), num_rows=num_rows)
    return alone[-1]


def _decide(
    sequence: Sequence, rows: TargetRows, path: tuple[int, ...], logits: Tensor
) -> tuple[int, tuple[TokenLogprob, ...]]:
    """Return the token after a path by these logits [1, vocab] of its end, with its log-probabilities if requested."""
    end = rows.of(on_device([path[-1] if path else 0], logits.device))
    end.know(0, logits)
    is_greedy = sequence.settings.sampling.temperature == 0
    token = end.best(0) if is_greedy else sequence.noise.draw(end.probs(0), len(path) + 1)
    count = sequence.settings.num_logprobs
    return token, () if count is None else end.logprobs([0], [token], count)
