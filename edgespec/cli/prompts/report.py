"""Messages about settings of rows and templates that are not applied, each said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from edgespec.chat.given_template import unread
from edgespec.chat.rendering import refuses_system
from edgespec.cli.console import Console, counted, named
from edgespec.cli.prompts.rows import PromptRow

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair

MAX_NAMED = 8  # keys in one line


def say_unused_keys(console: Console, rows: Sequence[PromptRow], *, applies: bool = True) -> None:
    """Say which keys of the rows change nothing here, and which are not known, with the number of their rows.

    Where a command runs all rows alike, no setting `applies` but the system prompt.
    """
    records = ", only handed through to the records" if applies else ""
    found: list[tuple[str, list[Iterable[str]]]] = [
        ("not applied, so that all prompts run alike",
         [() if applies else row.settings.set_values().keys() - {"system"} for row in rows]),
        (f"not applied{records}", [row.ignored_keys for row in rows]),
        (f"not known{records}", [row.unknown_keys for row in rows]),
    ]  # fmt: skip
    for what, keys in found:
        if any(keys):
            console.say(f"{what}: {_listed(keys)}")


def _listed(found: Iterable[Iterable[str]]) -> str:
    """Return keys with the numbers of their rows, those of most rows first."""
    counts = Counter(key for keys in found for key in keys)
    order = sorted(counts, key=lambda key: (-counts[key], key))
    return named([f"{key} ({counted(counts[key], 'row')})" for key in order], most=MAX_NAMED)


def template_notes(pair: ModelPair, names: Collection[str], *, has_system: bool) -> Iterator[str]:
    """Yield notes on values that the template does not read, and on a system message that it refuses."""
    ignored = unread(pair.tokenizer, names)
    if ignored:
        yield f"not applied: the chat template does not read {', '.join(ignored)}"
    if has_system and refuses_system(pair.tokenizer, pair.template_args):
        yield "the chat template has no system role: the system prompt goes before the first user's message"
