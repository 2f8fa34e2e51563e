"""The settings of training heads and routers: one record, checked where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from edgespec.errors import EdgespecError

Decay = Literal["cosine", "linear"]
RATE_BY_WIDTH = 0.75  # 3e-3 at a hidden size of 256, where 1e-3 learned more slowly
DECAYS: tuple[Decay, ...] = ("cosine", "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The optimiser and its schedule, the batches, and how often to look and to save."""

    training_steps: int = 1500
    batch_blocks: int = 2
    learning_rate: float | None = None  # None: by the model's width, see `for_width`
    warmup_steps: int = 50
    decay: Decay = "cosine"  # of the learning rate, to 0 in the last step
    weight_decay: float = 0.01  # of matrices; biases and norms have none
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = 0.5  # largest norm of all gradients together
    seed: int = 0
    evaluate_every: int = 250
    checkpoint_every: int = 250
    held_out_blocks: int = 32  # that evaluations look at

    def __post_init__(self) -> None:
        counts = (self.training_steps, self.batch_blocks, self.evaluate_every, self.checkpoint_every,
                  self.held_out_blocks)  # fmt: skip
        rates = (self.learning_rate or 0.0, self.weight_decay, self.gradient_clip)
        is_sound = (
            min(counts) >= 1
            and self.warmup_steps >= 0
            and self.decay in DECAYS
            and all(math.isfinite(rate) and rate >= 0 for rate in rates)
            and all(0 <= beta < 1 for beta in self.betas)
        )
        if not is_sound:
            raise EdgespecError("E_SETTING", f"training cannot be done so: {self}.", "Use positive numbers.")

    def for_width(self, hidden_size: int) -> TrainingSettings:
        """Return the settings with a learning rate; unless one was given, it is the smaller the wider the model is."""
        return self if self.learning_rate is not None else replace(self, learning_rate=RATE_BY_WIDTH / hidden_size)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        assert self.learning_rate is not None, "for_width comes first"
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.training_steps - self.warmup_steps)
        return self.learning_rate * (1 - share if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * share)))
