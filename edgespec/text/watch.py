"""Checks between the layers of a pass: whether to leave it, and how far prompts are read."""

from __future__ import annotations

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

    `on_prefill` of a text hears how much of its prompt is read; what that raises becomes the text's fault. Raises
    PassAbandonedError once `abandons` says so.
    """
    # Before the pass: tokens without rows
    unread = {text: text.sequence.target.num_unread for text in texts if text.sequence and not text.added}

    def watch(_share: float) -> None:
        if abandons():
            raise PassAbandonedError

    def watch_target(share: float) -> None:
        watch(share)
        for text, count in unread.items():
            if count and text.on_prefill and text.sequence and text.fault is None:
                new = len(text.request.ids) - text.sequence.target.num_kept
                try:
                    text.on_prefill(new - count + round(share * count), new)
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
