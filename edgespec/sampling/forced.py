"""Tokens that a grammar leaves alone: a text goes on with them whatever the model says."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

SURE, LIKELY = 0.999, 0.9  # chances of a token that is alone, and of one that a model may spell otherwise


class TokenMatcher(Protocol):
    """Says which tokens may follow a text."""

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow the text and a path, [vocab] bool on the host; None for any."""

    def likely(self, path: Sequence[int]) -> list[int]:
        """Return how a tokenizer spells the only text that may follow the text and a path."""


def forced_tokens(matcher: TokenMatcher, most: int) -> list[tuple[int, float]]:
    """Return the tokens that follow a text one by one, at most so many, each with its chance.

    Where the only text that may follow has several spellings, they are the tokenizer's own: the model decides.
    """
    path: list[int] = []
    chances: list[float] = []
    while len(path) < most:
        allowed = matcher.allowed(path)
        if allowed is None:
            break
        if int(allowed.count_nonzero()) == 1:
            path.append(int(allowed.int().argmax()))
            chances.append(SURE)
            continue
        likely = matcher.likely(path)[: most - len(path)]
        if not likely:
            break
        path += likely
        chances += [LIKELY] * len(likely)
    return list(zip(path, chances, strict=True))
