"""The options that say how texts are drawn: the same in every command that draws some."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from edgespec.cli.options.group import Command, with_options
from edgespec.cli.options.numbers import WholeNumber
from edgespec.config import SamplingSettings, require
from edgespec.text.bias import token_named

# llama.cpp's form ID(+/-)BIAS, or TOKEN=BIAS with an id or a text
_SIGNED = re.compile(r"(\d+)([+-].+)")
_NAMED = re.compile(r"(.+)=([^=]+)", re.DOTALL)
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
            repetition_penalty: float | None,
            presence_penalty: float | None,
            frequency_penalty: float | None,
            logit_bias: Mapping[int | str, float],
            ignore_eos: bool,
            greedy: bool = False,
            **others: Any,
        ) -> Any:
            if greedy and temperature:
                raise click.UsageError(f"--greedy is --temp 0, and --temp {temperature:g} was given.")
            given = {
                "temperature": 0.0 if greedy else temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
                "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty, "logit_bias": logit_bias or None,
                "ignore_eos": ignore_eos or None,
            }  # fmt: skip
            chosen = {name: value for name, value in given.items() if value is not None}
            return function(chosen=chosen, **others)

        greedy_option = click.option("--greedy", is_flag=True, help="The same as --temp 0.")
        options = [
            click.option("--temp", "--temperature", "temperature", type=float, callback=_checked,
                         help="0 is greedy. [default: the model's]"),
            *([greedy_option] if has_greedy else []),
            click.option("--top-k", type=WholeNumber(), callback=_checked,
                         help="Keep the k likeliest tokens; 0 keeps all. [default: the model's]"),
            click.option("--top-p", type=float, callback=_checked,
                         help="Keep the likeliest tokens of this mass. [default: the model's]"),
            click.option("--min-p", type=float, callback=_checked,
                         help="Drop tokens below this share of the likeliest. [default: the model's]"),
            click.option("--repeat-penalty", "--repetition-penalty", "repetition_penalty", type=float,
                         callback=_checked,
                         help="Divides logits of tokens in prompt and text, multiplies negative ones; 1 is none. "
                         "[default: the model's]"),
            click.option("--presence-penalty", type=float, callback=_checked,
                         help="Taken from logits of tokens in the new text, -2 to 2. [default: 0]"),
            click.option("--frequency-penalty", type=float, callback=_checked,
                         help="The same for each time that they stand there, -2 to 2. [default: 0]"),
            click.option("--logit-bias", multiple=True, metavar="TOKEN=BIAS", callback=_parsed_bias,
                         help="Added to a token's logit, -100 to 100; TOKEN is an id, or the text of one. "
                         "ID+BIAS and ID-BIAS do as well; repeatable."),
            click.option("--ignore-eos", is_flag=True, help="Never draw the model's own end of a text."),
        ]  # fmt: skip
        return with_options(call, options)

    return decorate


def _checked(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return a value that its setting takes; raises EdgespecError.

    That is known option by option, so that a value of a configuration is refused with its file.
    """
    del context
    if option.name == "top_k" and value == -1:  # as vLLM and transformers' servers write it
        return 0
    if value is not None:
        SamplingSettings(**{str(option.name): value})
    return value


def _parsed_bias(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> Mapping[int | str, float]:
    """Parse biases of tokens; raises click.BadParameter or EdgespecError."""
    found: dict[int | str, float] = {}
    for text in given:
        require_text("--logit-bias", text)
        match = _SIGNED.fullmatch(text) or _NAMED.fullmatch(text)
        try:
            token, bias = (match[1], float(match[2])) if match else ("", None)
        except ValueError:
            token, bias = "", None
        if bias is None:
            raise click.BadParameter(f"'{text}' is no TOKEN=BIAS, such as 42=-100.", param_hint="--logit-bias")
        found[token_named(token)] = bias
    checked: Mapping[int | str, float] = _checked(context, option, found)
    return checked


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
    """Raise EdgespecError for a --stop that is empty, or no text."""
    require(all(stops), "--stop is empty.", "Give the text to stop at, or leave it out.")
    for text in stops:
        require_text("--stop", text)


def require_text(flag: str, text: str) -> None:
    """Raise EdgespecError for bytes of the command line that are not text; Python hands them on as half surrogates."""
    require(text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text),
            f"{flag} is not UTF-8.", "Write it in UTF-8.")  # fmt: skip
