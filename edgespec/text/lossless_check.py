"""Texts that were asked for, judged against the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgespec.decode.lossless import Verdict, judge
from edgespec.model.causal_model import CausalModel
from edgespec.text.request import TextRequest


def judge_texts(
    model: CausalModel,
    requests: Sequence[TextRequest],
    texts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
) -> list[Verdict]:
    """Return how the text of each request differs from plain decoding's, and from the target's own."""
    return [
        judge(
            model,
            request.ids,
            text,
            other,
            request.settings(),
            request.noise(model.vocab, torch.device("cpu")),
            dtype=dtype,
        )
        for request, text, other in zip(requests, texts, plain, strict=True)
    ]
