"""A sequence holds what lives as long as a text: its models, how its tokens are drawn, and how far it has come."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.draft import Drafter
from edgespec.grow import Grow, Growth
from edgespec.model.target import Target
from edgespec.model.text_cache import AdapterUse
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.draws import draw_one
from edgespec.sampling.forced import TokenMatcher
from edgespec.sampling.logprobs import TokenLogprob, token_logprobs
from edgespec.sampling.matcher import TokenGrammar
from edgespec.sampling.noise import TextNoise
from edgespec.sampling.processors import LogitProcessors
from edgespec.sampling.thought_budget import BudgetMatcher, ThoughtBudget
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.lookup_choice import LookupChoice
from edgespec.tuning.step import Finish, PassCost, StepResult
from edgespec.verify.near_ties import NearTies
from edgespec.verify.rows import TargetRows, refuse_nan
from edgespec.verify.rules import Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """The settings of a text: how it is drawn, and how long it may become."""

    sampling: SamplingSettings
    max_new_tokens: int  # at least 1, or 0 where only the prompt's log-probabilities are wanted
    stop_tokens: frozenset[int] = frozenset()  # ids that end the text
    min_new_tokens: int = 0  # before which none of those is drawn
    suppressed: frozenset[int] = frozenset()  # ids that are never drawn
    grammar: TokenGrammar | None = None  # None: any text
    thought_budget: ThoughtBudget | None = None  # None: the text may think as long as it is
    num_logprobs: int | None = None  # alternatives beside each token; None: no log-probabilities at all
    adapters: AdapterUse = ()  # that the text's rows have
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens, which are all read then
    num_written: int = 0  # of the prompt's tokens, the last: the text's own, where it goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """What a text gains by a step."""

    path: tuple[int, ...]  # nodes below the root whose rows become text's
    tokens: tuple[int, ...]  # of these nodes, and one more: the next root
    from_draft: tuple[bool, ...]  # of each token, whether the tree had it
    from_lookup: tuple[bool, ...]  # and whether looked up text alone had proposed it
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens, where they are requested
    open_rows: TargetRows | None = None  # of the tree, where the last token is a near tie
    num_read_again: int = 0  # rows, to decide it: the path's are the text's since then
    turned: bool = False  # whether that brought another token


class Tuning(Protocol):
    """Learns from the steps of a text, for its trees to come."""

    @property
    def is_idle(self) -> bool:
        """Return whether the next few steps may go without it, with the root alone."""

    def begin_step(self, number: int, num_texts: int, num_unread: int) -> None:
        """Note the beginning of a step of this number of texts; all of them report it.

        The draft has not read `num_unread` of their tokens.
        """

    def take_tree(self, tree: TokenTree) -> None:
        """Take the tree that came of the text's growth."""

    def learn(self, step: StepResult) -> None:
        """Learn from a step of the text."""

    def observe(self, cost: PassCost) -> None:
        """Note the seconds of a step of all texts; one of the texts reports them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A running text. The target's and the draft's caches hold all of it but its last token, the root."""

    target: Target
    drafter: Drafter | None  # None: trees have what is looked up, or roots only
    settings: TextSettings
    generator: torch.Generator  # of draws with fresh noise
    noise: TextNoise  # of coupled draws; its position is the root's
    draws_coupled: bool  # whether the tokens are decided by the noise
    grow: Grow
    plain: Grow  # of roots alone
    verify: Verify
    processors: LogitProcessors | None = None  # None: logits are taken as they are
    tuning: Tuning | None = None
    near_ties: NearTies | None = None  # None: rows of trees decide
    lookup: LookupChoice | None = None  # None: nothing is looked up in text
    draft_context: int | None = None  # tokens that the draft has positions for; None: any number
    draft_depth: int | None = None  # most layers of a tree that the draft has guesses for; None: any number
    prompt: list[int] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of its tokens from the second on, as far as it is read
    root: int = -1  # the last token: it has no rows yet
    num_new: int = 0  # tokens after the prompt
    num_reading: int = 0  # of the prompt's rows, in the running pass
    reads_draft: bool = False  # whether the next tree waits until the draft has read more of the text
    draft_read_s: float = 0.0  # that it took, since the last step
    finish: Finish | None = None  # why the text has ended

    @property
    def num_left(self) -> int:
        """Return how many tokens the text may still gain."""
        return self.settings.max_new_tokens - self.num_new

    @property
    def has_drafted(self) -> bool:
        """Return whether the draft has a part in the step's tree."""
        return self.drafter is not None and (self.lookup is None or self.lookup.has_draft)

    def max_depth(self, most: int) -> int:
        """Return how many layers the next tree may have, `most` at most: both models must have positions for them."""
        if self.draft_context is not None:  # the last layer's nodes have no rows of the draft's
            most = min(most, max(0, self.draft_context + 1 - len(self.prompt) - self.num_new))
        if self.draft_depth is not None:
            most = min(most, self.draft_depth)
        return self.target.max_depth(most)

    def begin(self, prompt: list[int]) -> None:
        """Take the prompt; where the text continues, its earlier tokens follow."""
        self.prompt = prompt
        if self.lookup is not None:
            seen = self.target.seen
            self.lookup.lookup.begin(prompt if seen is None else seen.words_apart(prompt))
        if self.processors is not None:
            first_new = len(prompt) - self.settings.num_written
            self.processors.begin(prompt[:first_new], prompt[first_new:])

    def begin_target(self, ids: list[int], *, needs_logits: bool) -> None:
        """Let the target begin the text's tokens; earlier new tokens are no part of the prompt."""
        prompt_tokens = len(self.prompt) - self.settings.num_written
        self.target.begin(ids, needs_logits=needs_logits, prompt_tokens=prompt_tokens)

    def begin_tokens(self, logits: Tensor) -> tuple[int, ...]:
        """Take the logits [vocab] after the prompt, and return the first new token."""
        p = to_probs(self.processed(logits[None]), self.settings.sampling)[0]
        self.noise.start(len(self.prompt) - 1)
        token = self.noise.draw(p, 1) if self.draws_coupled else draw_one(p, self.generator)
        self.add((token,))
        if self.drafter is not None:
            self.drafter.begin(self.prompt)
        return (token,)

    def go_on(self) -> None:
        """Continue a text whose caches hold all but its last token, which becomes the root."""
        *before, self.root = self.prompt
        self.noise.start(len(before))
        if self.drafter is not None:
            self.drafter.begin(before)

    def growth(self) -> Growth:
        """Return the growth of the next tree; the text's last token needs no node, for verification yields it."""
        drafted = self.grow(self.root, self.max_depth(self.num_left - 1))
        if self.lookup is None:
            return drafted
        # The draft's limits are none of looked up text.
        return self.lookup.growth(drafted, self.root, self.target.max_depth(self.num_left - 1))

    def processed(self, logits: Tensor) -> Tensor:
        """Return processed logits [1, vocab] of the place after the text, from finite ones.

        Raises EdgespecError where that is not finite.
        """
        if self.processors is None:
            return logits
        processed = self.processors(logits)
        refuse_nan(processed.amax(-1), is_processed=True)
        return processed

    def logprobs(self, logits: Tensor, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of tokens [n] from the model's logits [n, vocab]; none without a request."""
        count = self.settings.num_logprobs
        return () if count is None else token_logprobs(logits, tokens, count)

    def add(self, tokens: tuple[int, ...]) -> None:
        """Add tokens to the text: the last one becomes the root."""
        if self.processors is not None:
            self.processors.add(tokens)
        if self.lookup is not None:
            self.lookup.lookup.add(tokens)
        self.root = tokens[-1]
        self.num_new += len(tokens)
        self.noise.advance(len(tokens))
        if self.root in self.settings.stop_tokens:
            self.finish = "stop"
        elif self.num_left <= 0:
            self.finish = "length"


def processors_of(settings: TextSettings, vocab: int, device: torch.device) -> LogitProcessors | None:
    """Return what becomes of a text's logits before they are made probabilities; None where nothing does."""
    sampling, grammar = settings.sampling, settings.grammar
    is_ruled = bool(settings.suppressed) or settings.min_new_tokens > 0
    if not sampling.penalises and grammar is None and settings.thought_budget is None and not is_ruled:
        return None
    matcher: TokenMatcher | None = None if grammar is None else grammar.matcher()
    if settings.thought_budget is not None:
        matcher = BudgetMatcher(settings.thought_budget, grammar, vocab=vocab)
    return LogitProcessors(
        sampling,
        ruled_out=settings.suppressed | (settings.stop_tokens if sampling.ignore_eos else frozenset()),
        stop_tokens=settings.stop_tokens,
        min_new_tokens=settings.min_new_tokens,
        matcher=matcher,
        vocab=vocab,
        device=device,
    )
