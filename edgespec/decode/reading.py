"""Prompts that are read: which rows of each a pass has, beside trees and other prompts."""

import time
from collections import abc
from dataclasses import dataclass

from edgespec.decode.sequence import Sequence
from edgespec.model.pass_rows import ALL_PROMPT_ROWS
from edgespec.tuning.prompt_parts import PromptParts

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
        most = rows_left if has_trees else target.num_unread
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
