"""Checks between the layers of a pass: who is left in it, whether to leave it, and how far prompts are read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from edgespec.model.causal_model import CausalModel
from edgespec.text.handle import TextHandle


class PassAbandonedError(Exception):
    """Raised to leave a pass between two layers."""


@contextmanager
def watching(
    models: Sequence[CausalModel], texts: Sequence[TextHandle], abandons: Callable[[], bool]
) -> Iterator[None]:
    """Within this block every layer is a place to leave the pass; the first model is the target.

    The target goes on without the rows of texts that nobody waits for. `on_prefill` of a text hears how much of its
    prompt is read; what that raises becomes the text's fault. Raises PassAbandonedError once `abandons` says so, or
    where nobody waits for any row of the pass.
    """
    # Before the pass: tokens without rows
    unread = {text: text.sequence.target.num_unread for text in texts if text.sequence and not text.added}

    def watch(_share: float, *, of_target: bool = False) -> None:
        found = [text for text in texts if _is_in_pass(text, of_target=of_target)]
        left = [text for text in found if _has_left(text)]
        if abandons() or (found and len(left) == len(found)):
            raise PassAbandonedError
        for text in left:
            if text.sequence is not None:
                text.sequence.target.leave_out()

    def watch_target(share: float) -> None:
        watch(share, of_target=True)
        for text, count in unread.items():
            if count and text.on_prefill and text.sequence and not _has_left(text):
                new = len(text.request.ids) - text.sequence.target.num_kept
                try:
                    text.on_prefill(new - count + round(share * text.sequence.num_reading), new)
                except Exception as error:  # of this text alone: the others go on
                    text.fault = error

    try:
        for model in models:
            model.watch = watch
        models[0].watch = watch_target
        yield
    finally:
        for model in models:
            model.watch = None


def _is_in_pass(text: TextHandle, *, of_target: bool) -> bool:
    """Return whether the pass has rows of a text: of its tree, or of its prompt."""
    sequence = text.sequence
    if sequence is None or (of_target and sequence.reads_draft):
        return False
    return sequence.num_reading > 0 or not sequence.target.num_unread


def _has_left(text: TextHandle) -> bool:
    """Return whether nobody waits for what the pass brings a text: rows of a prompt bring nothing to one that ends."""
    sequence = text.sequence
    is_reading = sequence is not None and (sequence.target.num_unread > 0 or sequence.reads_draft)
    return text.fault is not None or (text.is_cancelled and (text.is_left or is_reading))
