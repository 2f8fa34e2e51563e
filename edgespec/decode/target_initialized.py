"""Target-initialised trees: the target starts w branches, and the longest accepted one wins. LOSSY for w > 1.

Source: Improving-MCSD, section 3.1. After a pass the target's distribution is known where the accepted
path ends. Instead of one token, w are drawn from it, and each starts a branch of the next tree. Taking
the branch that was accepted furthest favours tokens that are easy to continue: the output has no
longer the target's distribution.

The last token of the path stays uncommitted and is the root of the next tree, whose children are the
w tokens; so trees, masks and caches are those of every other policy, for one row more a pass.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from edgespec.copies import on_device
from edgespec.decode.loop import tokens_at
from edgespec.decode.sequence import AcceptedPath, Sequence
from edgespec.grow import Growth
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.draws import draw_without_replacement
from edgespec.tree.token_tree import TokenTree, ancestors_mask
from edgespec.verify import accept_alone
from edgespec.verify.rows import TargetRows


class TargetInitialized:
    """Branches begin with `width` tokens of the target's; the first step yields no token, for they are drawn there."""

    needs_logits = True

    def __init__(self, width: int) -> None:
        self._width = width
        self._branches = torch.empty(0)  # [w], the root's children

    def begin(self, sequence: Sequence, logits: Tensor) -> tuple[int, ...]:
        """Draw the first branches from logits [vocab]; the prompt's last token is the root."""
        sequence.noise.start(len(sequence.prompt) - 1)
        sequence.target.uncommit_last()
        assert sequence.drafter is not None
        sequence.drafter.begin(sequence.prompt[:-1])
        p = to_probs(sequence.processed(logits[None]), sequence.settings.sampling)  # [1, vocab]
        self._branches = _draw(p, self._width, sequence.generator)
        sequence.root = sequence.prompt[-1]
        return ()

    def go_on(self, sequence: Sequence) -> None:
        """Do nothing: branches are drawn from logits."""

    def growth(self, sequence: Sequence) -> Growth:
        """Grow below the branches."""
        return sequence.grow.growth(sequence.root, max(1, sequence.max_depth(sequence.num_left)), self._branches)

    def accept(self, sequence: Sequence, tree: TokenTree, rows: TargetRows) -> Generator[int, None, AcceptedPath]:
        """Return the longest branch, ended at the first stop token, and draw the next ones at its end."""
        yield 0
        path, end_token = _longest(sequence, tree, rows)
        self._branches = _branches_after(rows.probs(path[-1]), end_token, self._width, sequence.generator)
        tokens = _until_stop(tokens_at(tree, path), sequence.settings.stop_tokens)[: sequence.num_left]
        return AcceptedPath(path=path[: len(tokens) - 1], tokens=tokens, num_started=1, num_proposed=len(tokens) - 1)


def _until_stop(tokens: tuple[int, ...], stop_tokens: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens up to the first that ends the text, that one included."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_tokens), len(tokens))
    return tokens[:end]


def _longest(sequence: Sequence, tree: TokenTree, rows: TargetRows) -> tuple[tuple[int, ...], int]:
    """Return the longest accepted path, its branch's first token included, and the token drawn at its end."""
    ancestors = ancestors_mask(tree.parents)
    best: tuple[tuple[int, ...], int] = ((), -1)
    for branch in (tree.parents == 0).nonzero().flatten().tolist():  # w, two or three
        nodes = ancestors[:, branch].nonzero().flatten()
        acceptance = accept_alone(sequence.verify(_subtree(tree, nodes), rows.of(nodes), sequence.generator))
        path = (branch, *nodes[on_device(acceptance.path, nodes.device)].tolist())
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
    return torch.cat([on_device([first], p.device), _draw(others[None], width - 1, generator)])
