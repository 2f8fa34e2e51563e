"""The result of one step of a text: its tokens, where they came from, and the seconds they took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.sampling.logprobs import TokenLogprob

Finish = Literal["stop", "length"]
MOST_IDLE_STEPS = 16  # that may follow each other without being tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """What all texts of a step took together."""

    num_texts: int  # whose trees were verified
    num_rows: int  # of their trees, the roots included
    num_prompt_rows: int  # of texts that were read in the same pass
    num_layers: int | None  # of the trees as the draft grew them; None: it grew none
    num_drafted: int  # nodes that the draft grew
    num_unread: int  # tokens from before the last step that the draft read on the way: of prompts, and of plain steps
    grow_s: float
    target_s: float
    rest_s: float  # probabilities, verification, commit
    decide_s: float = 0.0  # rows read again, for near ties


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step added to the text. Its seconds are those of all texts that shared the pass."""

    tokens: tuple[int, ...]  # at least one; none in the first step where the target starts several branches
    from_draft: tuple[bool, ...] = ()  # of each of these, whether the tree had it; in a prompt's step empty
    from_lookup: tuple[bool, ...] = ()  # and whether looked up text alone had proposed it
    num_cached: int = 0  # of the prompt's tokens, in its own step: rows that were there from the text before
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of these tokens, where they are requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens from the second on, in its own step
    finish: Finish | None  # why the text ends here
    num_drafted: int  # nodes below the root that were verified
    num_by_depth: tuple[int, ...] = ()  # of these nodes, at each depth below the root
    path: tuple[int, ...] = ()  # of these nodes, by number, the accepted ones from the top
    is_prefill: bool  # the first token comes from the pass over the prompt
    num_texts: int = 1  # that shared the pass
    grow_s: float
    target_s: float
    rest_s: float  # probabilities, verification, commit
    decide_s: float = 0.0  # rows read again, for near ties of any of these texts
    num_read_again: int = 0  # of this text's rows, because its last token was a near tie
    turned: bool = False  # whether that brought another token than the tree's row

    @property
    def num_accepted(self) -> int:
        """Return how many of the tokens the tree had."""
        return sum(self.from_draft)

    @property
    def num_looked_up(self) -> int:
        """Return how many of these looked up text alone had proposed."""
        return sum(self.from_lookup)

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole step."""
        return self.grow_s + self.target_s + self.rest_s + self.decide_s


def steps_since(before: int | None, number: int) -> int:
    """Return how many steps it is since the one with the number `before`; 1 where there was none in this batch."""
    passed = 1 if before is None else number - before
    return passed if passed <= MOST_IDLE_STEPS + 1 else 1
