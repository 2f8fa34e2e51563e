"""Several requests at once: their texts share passes, and each has its own end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult
from edgespec.text.scheduler import Scheduler


def finish_many(
    texts: Scheduler, requests: Iterable[TextRequest]
) -> Iterator[tuple[int, GenerationResult | Exception]]:
    """Yield the numbers and results of texts as they end, or errors.

    Closing the iterator ends the others, and so does whatever the requests raise.
    """
    numbers: dict[TextHandle, int] = {}
    try:
        for number, request in enumerate(requests):
            numbers[texts.submit(request, keeps=False)] = number
        while numbers:
            for handle in [handle for handle in numbers if handle.is_done]:
                yield numbers.pop(handle), handle.error or handle.whole()
            if numbers:
                texts.advance()
    finally:
        for handle in numbers:
            handle.cancel()


def tokens_of(texts: Scheduler, requests: Sequence[TextRequest]) -> list[list[int]]:
    """Return the tokens of texts that share passes; raises what ended one of them."""
    handles = [texts.submit(request, keeps=False) for request in requests]
    return [list(handle.result().token_ids) for handle in handles]
