"""Whole numbers on the command line, as people and programs write them: 16, 16.0, and -1 where that means off."""

import re
from collections.abc import Callable
from typing import Any

import click

OFF = "-1"
_WHOLE_FLOAT = re.compile(r"([+-]?\d+)\.0*")


def without_fraction(value: Any) -> Any:
    """Return a text like 16.0 as 16, and a float like it; anything else as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    match = _WHOLE_FLOAT.fullmatch(value) if isinstance(value, str) else None
    return match[1] if match else value


def is_auto(value: str) -> bool:
    """Return whether a number is left to us."""
    return without_fraction(value) in {"auto", OFF}


class _Whole(click.types.IntParamType):
    has_off = False

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; raises click.BadParameter."""
        whole = without_fraction(value)
        return None if self.has_off and str(whole) == OFF else super().convert(whole, param, ctx)


class WholeNumber(_Whole):
    """A whole number; `has_off` makes None of -1."""

    def __init__(self, *, has_off: bool = False) -> None:
        self.has_off = has_off


class WholeRange(_Whole, click.IntRange):
    """A whole number in a range; `has_off` makes None of -1."""

    def __init__(self, min: int | None = None, max: int | None = None, *, has_off: bool = False) -> None:  # noqa: A002
        super().__init__(min, max)
        self.has_off = has_off


class NumberOrAuto(_Whole):
    """A whole number of something, or auto, which is None; each of `words` stands for itself."""

    def __init__(
        self, of: str, *, words: tuple[str, ...] = (), check: Callable[[int], int | None] | None = None
    ) -> None:
        self.of, self.words, self.check = of, words, check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; raises click.BadParameter, or what `check` raises for a number out of its range."""
        if is_auto(value) or value in self.words:
            return value if value in self.words else None
        text = str(without_fraction(value))
        if not re.fullmatch(r"-?\d{1,9}" if self.check else r"\d{1,9}", text):
            self.fail(f"'{value}' is not {', '.join(('auto', *self.words))} or a number of {self.of}.", param, ctx)
        return self.check(int(text)) if self.check else int(text)
