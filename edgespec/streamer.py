"""What transformers calls a streamer, fed with the steps of a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from edgespec.results import TextChunk


class Streamer(Protocol):
    """Anything with these two methods."""

    def put(self, value: Tensor) -> None:
        """The prompt [1, n] first, then the tokens [k] of every step."""

    def end(self) -> None:
        """There is no more."""


def put_ids(input_ids: Tensor, chunks: Iterable[TextChunk], streamer: Streamer | None) -> Tensor:
    """Ids [1, n] and those of all chunks behind them [1, n + new], each handed to the streamer as it comes."""
    ids = input_ids[0].tolist()
    if streamer:
        streamer.put(input_ids.cpu())
    for chunk in chunks:
        ids += chunk.token_ids
        if streamer:
            streamer.put(torch.tensor(chunk.token_ids))
    if streamer:
        streamer.end()
    return torch.tensor([ids], device=input_ids.device)
