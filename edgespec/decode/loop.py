"""The loop over a text's steps, for a text alone."""

from collections import abc
from collections.abc import Iterator

from edgespec.decode.batch import Batch
from edgespec.decode.sequence import Sequence
from edgespec.decode.target_initialized import BranchedBatch, BranchedSequence
from edgespec.tuning.step import StepResult


def decode(sequence: Sequence, prompt: abc.Sequence[int]) -> Iterator[StepResult]:
    """Continue a prompt alone until a stop token, which is yielded too, or until the text is as long as it may be.

    Closing the iterator between steps leaves both caches at the text yielded so far, its last token excepted.
    """
    batch = BranchedBatch() if isinstance(sequence, BranchedSequence) else Batch()
    batch.enter(sequence, prompt)
    while sequence.finish is None:
        for outcome in batch.step():
            if outcome.error is not None:
                raise outcome.error
            if outcome.step is not None:
                yield outcome.step
