"""The options that say how texts are drawn: the same in every command that draws some."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from edgespec.cli.options.group import Command, with_options
from edgespec.config import SamplingSettings, require

LENGTH_SPELLINGS = ("--max-new-tokens", "--max-tokens", "--n-predict")


def distribution_options(*, has_greedy: bool) -> Callable[[Command], Command]:
    """Add temperature and truncation; fields of `SamplingSettings` that were given are handed on as `chosen`."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(
            *,
            temperature: float | None,
            top_k: int | None,
            top_p: float | None,
            min_p: float | None,
            greedy: bool = False,
            **others: Any,
        ) -> Any:
            if greedy and temperature:
                raise click.UsageError(f"--greedy is --temp 0, and --temp {temperature:g} was given.")
            given = {"temperature": 0.0 if greedy else temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            chosen = {name: value for name, value in given.items() if value is not None}
            SamplingSettings(**chosen)  # type: ignore[arg-type]  # wrong values are named before a model is touched
            return function(chosen=chosen, **others)

        greedy_option = click.option("--greedy", is_flag=True, help="The same as --temp 0.")
        options = [
            click.option("--temp", "--temperature", "temperature", type=float,
                         help="0 is greedy. [default: the model's]"),
            *([greedy_option] if has_greedy else []),
            click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all. [default: the model's]"),
            click.option("--top-p", type=float, help="Keep the likeliest tokens of this mass. [default: the model's]"),
            click.option("--min-p", type=float,
                         help="Drop tokens below this share of the likeliest. [default: the model's]"),
        ]  # fmt: skip
        return with_options(call, options)

    return decorate


def parse_temperatures(text: str) -> list[float]:
    """Parse a list of temperatures like 0,0.6,1; raises click.BadParameter."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= value < 100 for value in found):
        raise click.BadParameter(f"'{text}' is not a list of temperatures, such as 0,0.6,1.", param_hint="--temps")
    return found


def check_stops(stops: tuple[str, ...]) -> None:
    """Raise EdgespecError for a --stop that is empty, or no text, or took the option behind it for its text."""
    fix = "Give the text to stop at, or leave it out."
    require(all(stops), "--stop is empty.", fix)
    options = {spelling for option in click.get_current_context().command.params for spelling in option.opts}
    for text in stops:
        require(text not in options, f"--stop has no text: {text}, which follows it, is an option.", fix)
        require_text("--stop", text)


def require_text(flag: str, text: str) -> None:
    """Raise EdgespecError for bytes of the command line that are not text; Python hands them on as half surrogates."""
    require(text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text),
            f"{flag} is not UTF-8.", "Write it in UTF-8.")  # fmt: skip
