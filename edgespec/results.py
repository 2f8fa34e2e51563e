"""What a generation yields: pieces of text as they are verified, and the finished whole."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.config import SamplingSettings
from edgespec.decode import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """What one step added, as text: whole characters only, so that a chunk may be empty."""

    text: str
    step: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished text and how it came about."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop | length | context
    prompt_tokens: int
    seed: int
    sampling: SamplingSettings
    steps: tuple[StepResult, ...]
    total_s: float

    @property
    def passes(self) -> tuple[StepResult, ...]:
        """The verify passes: all steps but the prompt's."""
        return tuple(step for step in self.steps if not step.is_prefill)

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean tokens of a verify pass, the bonus token included."""
        return sum(len(step.tokens) for step in self.passes) / len(self.passes) if self.passes else None

    @property
    def prefill_s(self) -> float:
        """Seconds of the pass over the prompt."""
        return self.steps[0].target_s

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds until the first token was known."""
        return self.steps[0].target_s + self.steps[0].rest_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first over the seconds after the first."""
        decode_s = self.total_s - self.time_to_first_token_s
        count = len(self.token_ids) - 1
        return count / decode_s if count > 0 and decode_s > 0 else None
