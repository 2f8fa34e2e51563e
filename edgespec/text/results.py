"""Results of a generation: pieces of text as they are verified, the finished whole, or ids for a streamer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.text.token_ids import Prompt, token_ids
from edgespec.tuning.step import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """What one step added, as text, in whole characters, so a chunk may be empty; the last shows a part as U+FFFD."""

    text: str
    step: StepResult
    stop_string: str | None = None  # that ends the text here, and is no part of it

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The step's tokens."""
        return self.step.tokens

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the step's tokens, where the request has them."""
        return self.step.logprobs

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """Return for each token whether the draft proposed it."""
        return self.step.from_draft or (False,) * len(self.step.tokens)

    @property
    def finish_reason(self) -> str | None:
        """Return why the text ends here; it is None in the last chunk of a text that was interrupted."""
        return self.step.finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The numbers of tokens of a text."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt's, those that were not read again
    image_tokens: int  # of the prompt's, the rows of pictures
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """The prompt's tokens and the new ones together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished text and how it came about."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop | length | context | interrupted
    stop_string: str | None = None  # that ended it, where one did
    prompt_tokens: int
    image_tokens: int = 0  # of these, the rows of pictures
    seed: int
    sampling: SamplingSettings
    steps: tuple[StepResult, ...]
    total_s: float
    first_token_after_s: float | None = None  # from the request on, the time in which it waited included

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of each new token in the model's own distribution, where the request has them."""
        return tuple(found for step in self.steps for found in step.logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the prompt's tokens from the second on, where the request has them."""
        return tuple(found for step in self.steps for found in step.prompt_logprobs)

    @property
    def usage(self) -> Usage:
        """The numbers of tokens read and made."""
        return Usage(
            prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens, image_tokens=self.image_tokens,
            completion_tokens=len(self.token_ids),
        )  # fmt: skip

    @property
    def cached_tokens(self) -> int:
        """The number of the prompt's tokens whose rows the cache held."""
        return self.steps[0].num_cached if self.steps else 0

    @property
    def passes(self) -> tuple[StepResult, ...]:
        """The verify passes: all steps but the prompt's."""
        return tuple(step for step in self.steps if not step.is_prefill)

    @property
    def tokens_per_pass(self) -> float | None:
        """The mean number of tokens of a verify pass, the bonus token included."""
        return sum(len(step.tokens) for step in self.passes) / len(self.passes) if self.passes else None

    @property
    def prefill_s(self) -> float:
        """The seconds of the pass over the prompt; where it was abandoned, all seconds there were."""
        return self.steps[0].target_s if self.steps else self.total_s

    @property
    def time_to_first_token_s(self) -> float:
        """The seconds until the first token was known."""
        return self.steps[0].target_s + self.steps[0].rest_s if self.steps else self.total_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """The tokens after the first over the seconds after the first."""
        decode_s = self.total_s - self.time_to_first_token_s
        count = len(self.token_ids) - 1
        return count / decode_s if count > 0 and decode_s > 0 else None


class Streamer(Protocol):
    """What transformers calls a streamer: any object with these two methods."""

    def put(self, value: Tensor) -> None:
        """Take the prompt [1, n] first, then the tokens [k] of every step."""

    def end(self) -> None:
        """Learn that nothing more comes."""


def put_ids(
    input_ids: Prompt, continue_ids: Callable[[list[int]], Iterable[TextChunk]], streamer: Streamer | None
) -> Tensor:
    """Hand the ids of one text and what continues them to the streamer as it comes; return them all [1, n + new].

    Padding stays where it stands, and is not read. Raises EdgespecError for more than one text.
    """
    ids = token_ids(input_ids, with_padding=True)
    pieces = continue_ids(token_ids(input_ids))
    if streamer:
        streamer.put(torch.tensor([ids]))
    for chunk in pieces:
        ids += chunk.token_ids
        if streamer:
            streamer.put(torch.tensor(chunk.token_ids))
    if streamer:
        streamer.end()
    ids_given = getattr(input_ids, "input_ids", input_ids)
    return torch.tensor([ids], device=ids_given.device if isinstance(ids_given, Tensor) else None)
