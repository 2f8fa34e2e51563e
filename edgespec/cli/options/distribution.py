"""The options that say how texts are drawn: the same in every command that draws some."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options.numbers import WholeNumber, WholeRange
from edgespec.cli.options.record import option
from edgespec.cli.prompts.read import read_text
from edgespec.config import MAX_SEED, SamplingSettings, require
from edgespec.text.bias import token_named, with_token_ids

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair

# llama.cpp's form ID(+/-)BIAS, or TOKEN=BIAS with an id or a text
_SIGNED = re.compile(r"(\d+)([+-].+)")
_NAMED = re.compile(r"(.+)=([^=]+)", re.DOTALL)
LENGTH_SPELLINGS = ("--max-new-tokens", "--max-tokens", "--n-predict")
RAW_HELP = "Leave the model's chat template out."
TOP_K_HELP = "Keep the k likeliest tokens; 0 keeps all. [default: the model's]"
TOP_P_HELP = "Keep the likeliest tokens of this mass. [default: the model's]"
MIN_P_HELP = "Drop tokens below this share of the likeliest. [default: the model's]"
REPETITION_HELP = (
    "Divide logits of tokens in prompt and text by this, and multiply negative ones; 1 is none. [default: the model's]"
)
PRESENCE_HELP = "Take this from logits of tokens in the new text, -2 to 2. [default: 0]"
FREQUENCY_HELP = "Take this from them for each time that they stand there, -2 to 2. [default: 0]"
BIAS_HELP = (
    "Add this to a token's logit, -100 to 100; TOKEN is an id, or the text of one. ID+BIAS and ID-BIAS do as well; "
    "repeatable."
)
SEED_HELP = "Draw with this seed. [default: random]"
STOP_HELP = "End a text before this string, which is left out; repeatable."
SYSTEM_HELP = "Use this system prompt for rows without one."
SYSTEM_FILE_HELP = "Read the system prompt from a file."


def checked_sampling(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return a value that its setting takes; raises EdgespecError.

    That is known option by option, so that a value of a configuration is refused with its file.
    """
    del context
    if option.name == "top_k" and value == -1:  # as vLLM and transformers' servers write it
        return 0
    if value is not None:
        SamplingSettings(**{str(option.name): value})
    return value


def _parsed_bias(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> Mapping[int | str, float]:
    """Parse biases of tokens; raises click.BadParameter or EdgespecError."""
    found: dict[int | str, float] = {}
    for text in values:
        require_text("--logit-bias", text)
        match = _SIGNED.fullmatch(text) or _NAMED.fullmatch(text)
        try:
            token, bias = (match[1], float(match[2])) if match else ("", None)
        except ValueError:
            token, bias = "", None
        if bias is None:
            raise click.BadParameter(f"'{text}' is no TOKEN=BIAS, such as 42=-100.", param_hint="--logit-bias")
        found[token_named(token)] = bias
    checked: Mapping[int | str, float] = checked_sampling(context, option, found)
    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionOptions:
    """Temperature and truncation."""

    temperature: float | None = option(
        "--temp", "--temperature", type=float, callback=checked_sampling,
        help="Set the temperature; 0 is greedy. [default: the model's]",
    )  # fmt: skip
    greedy: bool = False
    top_k: int | None = option("--top-k", type=WholeNumber(), callback=checked_sampling, help=TOP_K_HELP)
    top_p: float | None = option("--top-p", type=float, callback=checked_sampling, help=TOP_P_HELP)
    min_p: float | None = option("--min-p", type=float, callback=checked_sampling, help=MIN_P_HELP)
    repetition_penalty: float | None = option(
        "--repeat-penalty", "--repetition-penalty", type=float, callback=checked_sampling, help=REPETITION_HELP
    )
    presence_penalty: float | None = option(
        "--presence-penalty", type=float, callback=checked_sampling, help=PRESENCE_HELP
    )
    frequency_penalty: float | None = option(
        "--frequency-penalty", type=float, callback=checked_sampling, help=FREQUENCY_HELP
    )
    logit_bias: Mapping[int | str, float] = option(
        "--logit-bias", multiple=True, metavar="TOKEN=BIAS", callback=_parsed_bias, help=BIAS_HELP
    )
    ignore_eos: bool = option("--ignore-eos", is_flag=True, help="Never draw the model's own end of a text.")

    def sampling_of(self, pair: ModelPair) -> SamplingSettings:
        """Return the pair's own sampling with what was given in its place; raises EdgespecError."""
        values = {one.name: getattr(self, one.name) for one in fields(SamplingSettings)}
        values["temperature"] = 0.0 if self.greedy else self.temperature
        # No flag and no bias are given as False and as an empty mapping
        chosen = {
            name: value for name, value in values.items() if value is not None and value is not False and value != {}
        }
        return with_token_ids(replace(pair.default_sampling(), **chosen), pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingOptions(DistributionOptions):
    """How texts are drawn, and where they end."""

    greedy: bool = option("--greedy", is_flag=True, help="Set --temp 0.")
    seed: int | None = option("--seed", type=WholeRange(0, MAX_SEED, has_off=True), help=SEED_HELP)
    stop: tuple[str, ...] = option("--stop", multiple=True, metavar="STR", help=STOP_HELP)

    def __post_init__(self) -> None:
        if self.greedy and self.temperature:
            raise click.UsageError(f"--greedy is --temp 0, and --temp {self.temperature:g} was given.")
        require(all(self.stop), "--stop is empty.", "Give the text to stop at, or leave it out.")
        for text in self.stop:
            require_text("--stop", text)


def parse_temperatures(text: str) -> list[float]:
    """Parse a list of temperatures like 0,0.6,1; raises click.BadParameter."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= value < 100 for value in found):
        raise click.BadParameter(f"'{text}' is not a list of temperatures, such as 0,0.6,1.", param_hint="--temps")
    return found


def read_system(system: str | None, system_file: str | None) -> str | None:
    """Return the system prompt that two options give; raises click.UsageError, or EdgespecError for the file."""
    if system is not None and system_file is not None:
        raise click.UsageError("Give one system prompt: --system or --system-file.")
    if system_file is not None:
        system = read_text(system_file, what="a text file").removesuffix("\n")
    require_text("--system", system or "")
    return system or None


def require_text(flag: str, text: str) -> None:
    """Raise EdgespecError for bytes of the command line that are not text; Python hands them on as half surrogates."""
    require(text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text),
            f"{flag} is not UTF-8.", "Write it in UTF-8.")  # fmt: skip
