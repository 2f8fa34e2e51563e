"""What a person typed: a message, or a command with its argument. Knows words, no terminal and no model."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

QUOTES = '"""'


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedLine:
    """A message to send, or the command that it is."""

    text: str  # the message, or the command's argument
    command: str | None = None  # its first word without the slash, in lower case


def parse(typed: str) -> TypedLine:
    """Tell commands from messages: a command begins with a slash, and // begins a message with a slash."""
    if typed.startswith("//"):
        return TypedLine(text=typed[1:])
    if typed.startswith("/"):
        word, *rest = typed.split(maxsplit=1)
        return TypedLine(command=word[1:].lower(), text=rest[0].strip() if rest else "")
    return TypedLine(text=typed)


def wants_more(typed: str) -> bool:
    """Return whether a block in triple quotes is still open."""
    text = typed.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def without_quotes(typed: str) -> str:
    """Return a block without its quotes and the line breaks next to them; other text is returned as it is."""
    text = typed.strip()
    if not text.startswith(QUOTES) or wants_more(typed):
        return typed
    return text[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


def continues(line: str) -> bool:
    """Return whether a line ends in a backslash that stands for a new line; two backslashes mean a backslash."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was most likely meant, if any is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)), None)


def first_line(text: str) -> str:
    """Return the beginning of a text, for one line."""
    line, _, rest = text.partition("\n")
    return f"{line[:60]} ..." if rest or len(line) > 60 else line
