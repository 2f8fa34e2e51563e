"""A session holds what lives as long as a text: its models, how its tokens are drawn, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from edgespec.config import SamplingSettings
from edgespec.decode.step import Finish, StepResult
from edgespec.draft import Drafter
from edgespec.grow import Grow
from edgespec.model.target import Target
from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.rows import TargetRows

Verify = Callable[[TokenTree, TargetRows, torch.Generator], Acceptance]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """The settings of a text: how it is drawn, how long it may become, and the room that it needs."""

    sampling: SamplingSettings
    max_new_tokens: int  # at least 1
    cache_rows: tuple[int, int]  # to make room for, in the target's and in the draft's cache
    stop_tokens: frozenset[int] = frozenset()  # ids that end the text


@dataclass(slots=True, kw_only=True)
class Session:
    """A text under way. The target's and the draft's caches hold all of it but its last token, the root."""

    target: Target
    drafter: Drafter | None  # None: trees are roots only
    settings: TextSettings
    generator: torch.Generator  # of draws with fresh noise
    noise: TextNoise  # of coupled draws; its position is the root's
    draws_coupled: bool  # whether the tokens are decided by the noise
    grow: Grow
    verify: Verify
    learn: Callable[[StepResult], None] = field(default=lambda _step: None)  # what growth is told of every step
    root: int = -1  # the last token: it has no rows yet
    num_new: int = 0  # tokens behind the prompt
    finish: Finish | None = None  # why the text has ended

    @property
    def num_left(self) -> int:
        """Return how many tokens the text may still gain."""
        return self.settings.max_new_tokens - self.num_new

    def add(self, tokens: tuple[int, ...]) -> None:
        """Add tokens to the text: the last one becomes the root."""
        self.root = tokens[-1]
        self.num_new += len(tokens)
        self.noise.advance(len(tokens))
        if self.root in self.settings.stop_tokens:
            self.finish = "stop"
        elif self.num_left <= 0:
            self.finish = "length"
