"""The rules of lossless decoding: which tree a text grows, and which of its paths it takes.

They know no policy, model or tokenizer: those come with the session.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Generator, Iterator

from torch import Tensor

from edgespec.copies import on_device
from edgespec.decode.batch import Batch
from edgespec.decode.sequence import AcceptedPath, Sequence
from edgespec.grow import Growth
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.draws import draw_one
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.step import StepResult
from edgespec.verify.rows import TargetRows


class Lossless:
    """A step yields the nodes that verification accepts, and the target's own token behind them."""

    needs_logits = False

    def go_on(self, sequence: Sequence) -> None:
        """Go on behind a text that is whole in the caches but for its last token, which becomes the root."""
        *before, sequence.root = sequence.prompt
        sequence.noise.start(len(before))
        if sequence.drafter is not None:
            sequence.drafter.begin(before)

    def begin(self, sequence: Sequence, logits: Tensor) -> tuple[int, ...]:
        """Draw the first token from logits [vocab]."""
        p = to_probs(sequence.processed(logits[None]), sequence.settings.sampling)[0]
        sequence.noise.start(len(sequence.prompt) - 1)
        token = sequence.noise.draw(p, 1) if sequence.draws_coupled else draw_one(p, sequence.generator)
        sequence.add((token,))
        if sequence.drafter is not None:
            sequence.drafter.begin(sequence.prompt)
        return (token,)

    def growth(self, sequence: Sequence) -> Growth:
        """Grow below the root; the text's last token needs no node, for verification yields it."""
        return sequence.grow.growth(sequence.root, sequence.max_depth(sequence.num_left - 1))

    def accept(self, sequence: Sequence, tree: TokenTree, rows: TargetRows) -> Generator[int, None, AcceptedPath]:
        """Verify the tree, and return the path that the text takes, ended at the first stop token."""
        acceptance = yield from sequence.verify(tree, rows, sequence.generator)
        proposed = tokens_at(tree, acceptance.path)
        tokens = (*proposed, acceptance.next_token)
        stops = sequence.settings.stop_tokens
        stop = next((index for index, token in enumerate(tokens) if token in stops), len(proposed))
        return AcceptedPath(
            path=acceptance.path[:stop], tokens=tokens[: stop + 1], num_proposed=min(len(proposed), stop + 1)
        )


def decode(sequence: Sequence, prompt: abc.Sequence[int]) -> Iterator[StepResult]:
    """Continue a prompt alone until a stop token, which is yielded too, or until the text is as long as it may be.

    Closing the iterator between steps leaves both caches at the text yielded so far, its last token excepted.
    """
    batch = Batch()
    batch.enter(sequence, prompt)
    while sequence.finish is None:
        for outcome in batch.step():
            if outcome.error is not None:
                raise outcome.error
            if outcome.step is not None:
                yield outcome.step


def tokens_at(tree: TokenTree, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of some nodes: a handful, fetched after verification has waited for the pass."""
    return tuple(tree.tokens[on_device(nodes, tree.tokens.device)].tolist())
