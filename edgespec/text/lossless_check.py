"""Texts are decoded through the trees and plainly, and judged against the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from edgespec.decode.lossless import Verdict, judge
from edgespec.model.causal_model import CausalModel
from edgespec.text.request import TextRequest
from edgespec.text.scheduler import Scheduler
from edgespec.text.trees import Trees


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
        judge(model, request.ids, text, other, request, request.noise(model.vocab, torch.device("cpu")), dtype=dtype)
        for request, text, other in zip(requests, through_trees, plain, strict=True)
    ]


def _decoded(texts: Scheduler, requests: Sequence[TextRequest]) -> list[tuple[int, ...]]:
    handles = [texts.submit(request, keeps=False) for request in requests]
    return [handle.result().token_ids for handle in handles]
