"""Several requests at once, whose texts share passes: their results as they end, or judged against the target."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from edgespec.decode.lossless import Verdict, judge
from edgespec.model.causal_model import CausalModel
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult
from edgespec.text.scheduler import Scheduler
from edgespec.text.trees import Trees


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
                for number, request in islice(numbered, max(0, 2 * texts.num_texts - len(numbers))):
                    numbers[texts.submit(request, keeps=False)] = number
            if not numbers:
                return
            texts.advance()
            for handle in [handle for handle in numbers if handle.is_done]:
                yield numbers.pop(handle), handle.error or handle.whole()
    finally:
        for handle in numbers:
            handle.cancel()


def check_lossless(
    texts: Scheduler, trees: Trees, model: CausalModel, requests: Sequence[TextRequest], *, dtype: torch.dtype
) -> list[Verdict]:
    """Return how the text of each request differs from plain decoding's, and from the target's own.

    Trees that are not coupled give other draws than plain decoding: of those, greedy texts are compared instead.
    """
    if trees.settings.children != "coupled":
        requests = [replace(text, sampling=replace(text.sampling, temperature=0.0)) for text in requests]
    through_trees = _decoded(texts, requests)
    with trees.held_to(trees.settings.plain()):
        plain = _decoded(texts, requests)
    return [
        judge(
            model,
            texts.read_as(request),
            text,
            other,
            request,
            request.noise(model.vocab, torch.device("cpu")),
            dtype=dtype,
        )
        for request, text, other in zip(requests, through_trees, plain, strict=True)
    ]


def _decoded(texts: Scheduler, requests: Sequence[TextRequest]) -> list[tuple[int, ...]]:
    handles = [texts.submit(request, keeps=False) for request in requests]
    return [handle.result().token_ids for handle in handles]
