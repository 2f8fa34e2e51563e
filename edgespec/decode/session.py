"""A session holds what lives as long as a text: its models, how its tokens are drawn, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode.step import Finish, PassCost, StepResult
from edgespec.draft import Drafter
from edgespec.grow import Growth
from edgespec.grow.together import Grow
from edgespec.model.target import Target
from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.rows import TargetRows

Verify = Callable[[TokenTree, TargetRows, torch.Generator], Acceptance]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """The settings of a text: how it is drawn, and how long it may become."""

    sampling: SamplingSettings
    max_new_tokens: int  # at least 1
    stop_tokens: frozenset[int] = frozenset()  # ids that end the text


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """What a text gains by a step."""

    path: tuple[int, ...]  # nodes below the root whose rows become text's
    tokens: tuple[int, ...]  # of these nodes, and one more: the next root
    num_started: int = 0  # of the tokens, from the front: the target's, which started branches
    num_proposed: int  # of the tokens behind those: the draft's


class Rules(Protocol):
    """How a text goes on: what its trees begin with, and which of their paths it takes."""

    def begin(self, session: Session, logits: Tensor) -> tuple[int, ...]:
        """Take the logits [vocab] behind the prompt, and return the tokens that are known now; the root is set."""

    def growth(self, session: Session) -> Growth:
        """Return the growth of the next tree."""

    def accept(self, session: Session, tree: TokenTree, rows: TargetRows) -> AcceptedPath:
        """Return the path that the text takes, ended at the first stop token."""


class Tuning(Protocol):
    """Learns from the steps of a text, for its trees to come."""

    def begin_step(self, number: int, num_texts: int) -> None:
        """Hear that a step of so many texts begins; all of them tell its number."""

    def learn(self, step: StepResult) -> None:
        """Learn from a step of the text."""

    def observe(self, cost: PassCost) -> None:
        """Learn what a step of all texts took; one of the texts tells it."""


@dataclass(slots=True, kw_only=True, eq=False)
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
    rules: Rules
    tuning: Tuning | None = None
    prompt: list[int] = field(default_factory=list)
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
