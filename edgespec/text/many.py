"""Several requests at once: their texts share passes, and each has its own end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult
from edgespec.text.scheduler import Scheduler


def finish_many(
    texts: Scheduler, requests: Iterable[TextRequest]
) -> Iterator[tuple[int, GenerationResult | Exception]]:
    """Yield the numbers and results of texts as they end, or errors.

    Requests are taken as texts end: as many wait as may be under way. Closing the iterator ends the others, and so
    does whatever the requests raise. Where all texts are cancelled, no further request is taken.
    """
    numbered, num_cancels = enumerate(requests), texts.num_cancels
    numbers: dict[TextHandle, int] = {}
    try:
        while True:
            if texts.num_cancels == num_cancels:
                for number, request in islice(numbered, max(0, 2 * texts.most - len(numbers))):
                    numbers[texts.submit(request, keeps=False)] = number
            if not numbers:
                return
            texts.advance()
            for handle in [handle for handle in numbers if handle.is_done]:
                yield numbers.pop(handle), handle.error or handle.whole()
    finally:
        for handle in numbers:
            handle.cancel()
