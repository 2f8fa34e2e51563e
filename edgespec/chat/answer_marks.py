"""The marks between the parts of an answer: the next one, as soon as no text that may come can change it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

# Of a family whose every word stands between marks: what control tokens leave is no word.
BETWEEN = r"<\|(?:start\|>assistant|end\|>|return\|>|call\|>)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a part of the answer begins or ends."""

    start: int
    end: int
    opens: ResponseTemplateField | None  # None: it ends what is open, or says nothing
    captures: dict[str, str] = field(default_factory=dict)


@functools.lru_cache(maxsize=256)
def pattern_of(text: str) -> Any:
    """Return a pattern that can be matched in part, and whose dots match ends of lines."""
    import regex  # here, because a help text has no time for it

    return regex.compile(text, regex.DOTALL)


def next_mark(
    text: str, at: int, fields: Sequence[ResponseTemplateField], current: ResponseTemplateField | None, *, is_end: bool
) -> Mark | int:
    """Return the first mark behind a place, or up to where there is none; `current` is what is open."""
    held, best = len(text), None
    for pattern, opens, literals in _watched(fields, current):
        found = pattern.search(text, at, partial=not is_end)
        if found is None or (found.end() == found.start() and (is_end or found.start() < len(text)) and opens is None):
            continue
        if not is_end and (found.partial or _may_change(text, found, pattern, literals)):
            held = min(held, found.start())
            continue
        key = (found.start(), -found.end(), opens is None)
        if best is None or key < best[0]:
            best = key, found, opens
    if best is None or (best[0][0] >= held and not is_end):
        return held
    _, found, opens = best
    captures = {name: value for name, value in found.groupdict().items() if value is not None}
    return Mark(start=found.start(), end=found.end(), opens=opens, captures=captures)


def _watched(
    fields: Sequence[ResponseTemplateField], current: ResponseTemplateField | None
) -> Iterator[tuple[Any, ResponseTemplateField | None, bool]]:
    """Yield patterns with what they open, and whether what they match at the text's end is whole."""
    if current is not None:
        if current.close_re is not None:
            yield current.close_re, None, current.close_literals is not None and not current.close_literal_can_extend
        return
    yield from (
        (found.open_re, found, found.open_literals is not None and not found.open_literal_can_extend)
        for found in fields
        if found.open_re is not None
    )
    implicit = next((found for found in fields if found.open_re is None), None)
    if implicit is None:
        yield pattern_of(BETWEEN), None, True
    elif implicit.close_re is not None:
        yield implicit.close_re, None, False


def _may_change(text: str, found: Any, pattern: Any, is_literal: bool) -> bool:
    """Return whether a match could still become another, because it looks at the text's end."""
    if is_literal:
        return False
    if found.end() == len(text):
        return True
    other = pattern.match(text + "\x00", found.start())
    return other is None or other.span() != found.span() or other.groupdict() != found.groupdict()
