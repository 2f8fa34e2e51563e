"""Prompts that are read: which rows of each a pass has, beside trees and other prompts, and how likely they were."""

import time
from collections import abc
from dataclasses import dataclass

from torch import Tensor

from edgespec.decode.sequence import Sequence
from edgespec.model.pass_rows import ALL_PROMPT_ROWS, MOST_PROMPT_ROWS
from edgespec.model.row_chunks import row_chunks
from edgespec.sampling.logprobs import ROWS_AT_ONCE, TokenLogprob, token_logprobs
from edgespec.tuning.prompt_parts import PromptParts
from edgespec.verify.rows import refuse_nan

PROMPT_ROWS = 2048  # that are read beside trees in a pass; without trees it may be more


@dataclass(slots=True)
class ReadPrompt:
    """A text whose prompt is being read."""

    sequence: Sequence
    goes_on: bool = False  # its root is known
    started: float | None = None
    rows: int = 0  # in the running pass


def share_out(prompts: abc.Sequence[ReadPrompt], parts: PromptParts, *, has_trees: bool) -> list[ReadPrompt]:
    """Let prompts have rows in the pass, and return those that have some.

    The one that came first has a part, so that it is read at some time; the others have what is left of the pass, or
    another part, those with least to read first: a short one does not wait for a long one. One that has just come has a
    pass before the next part, where passes are short.
    """
    if not prompts:
        return []
    first, *others = prompts
    target = first.sequence.target
    part = parts.num_rows(target.part_rows, is_shared=has_trees or bool(others))
    rows_left = PROMPT_ROWS if has_trees else ALL_PROMPT_ROWS
    if part is None:
        most = rows_left if has_trees else MOST_PROMPT_ROWS
    else:
        most = min(part, rows_left) if not others else max(target.part_rows, min(part, rows_left) // 2)
        rows_left = 2 * most
    had_part, is_long = first.rows > 0, target.num_unread > 2 * target.part_rows
    has_short = any(one.started is None and one.sequence.target.num_unread <= target.part_rows for one in others)
    waits = had_part and is_long and has_short and not parts.reads_once
    first.rows = 0 if waits else target.rows_within(most)
    rows_left -= first.rows
    for prompt in sorted(others, key=lambda prompt: prompt.sequence.target.num_unread):
        prompt.rows = prompt.sequence.target.rows_within(max(0, rows_left))
        rows_left -= prompt.rows
    for prompt in prompts:
        prompt.sequence.num_reading = prompt.rows
    found = [prompt for prompt in prompts if prompt.rows]
    for prompt in found:
        prompt.started = time.perf_counter() if prompt.started is None else prompt.started
    return found


def take_prompt_rows(sequence: Sequence, hidden: Tensor, count: int) -> None:
    """Commit the next `count` rows of a prompt, whose last hidden states are [count, h].

    Each says how likely the token after it is. Logits are made in chunks: those of all rows would not fit.
    """
    target, alternatives = sequence.target, sequence.settings.num_prompt_logprobs
    if alternatives is not None and sequence.settings.num_written == 0:
        first = len(sequence.prompt) - target.num_unread
        following = sequence.prompt[first + 1 : first + count + 1]  # the prompt's last token is followed by none
        found: list[TokenLogprob] = []
        for rows in row_chunks(len(following), target.vocab):
            logits = target.logits(hidden[rows])
            refuse_nan(logits.amax(-1))
            for part, tokens in zip(logits.split(ROWS_AT_ONCE), _split(following[rows], ROWS_AT_ONCE), strict=True):
                found += token_logprobs(part, tokens, alternatives)
        sequence.prompt_logprobs += tuple(found)
    target.took_in(count)


def _split(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]
