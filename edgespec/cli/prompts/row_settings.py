"""What a row of a prompt file sets for itself: the names, checked before a model is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.cli.spelling import spelled
from edgespec.config import MAX_LOGPROBS, MAX_SEED, SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import response_format_grammar
from edgespec.text.bias import token_named

NUMBER_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING_KEYS = (*NUMBER_KEYS, "logit_bias", "ignore_eos")
ROW_SPELLINGS = {name: name for name in SAMPLING_KEYS}
LENGTH_KEYS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
LOGPROB_KEYS = ("logprobs", "top_logprobs")  # of chats the first is a switch, of completions the number itself
SETTING_KEYS = {*LENGTH_KEYS, *SAMPLING_KEYS, *LOGPROB_KEYS, "response_format", "seed", "stop", "system"}
# Keys of other tools that would change the text, and do not here
IGNORED_KEYS = {
    "best_of",
    "guided_json",
    "min_tokens",
    "model",
    "n",
    "suffix",
    "tool_choice",
    "tools",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """The settings of a row; where one is None, the run's own holds."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    system: str | None = None

    def given(self) -> dict[str, Any]:
        """Return what the row sets, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def sampling(self) -> dict[str, Any]:
        """Return those of them that `SamplingSettings` has."""
        found = {name: value for name, value in self.given().items() if name in SAMPLING_KEYS}
        if self.logit_bias is not None:
            found["logit_bias"] = _by_token(self.logit_bias)
        return found


def parse_settings(values: Mapping[str, Any], where: str) -> RowSettings:
    """Parse the settings among a row's keys; null is not given. Raises EdgespecError with the row and the key."""
    given = {name: value for name, value in values.items() if value is not None and name in SETTING_KEYS}
    lengths = [name for name in LENGTH_KEYS if name in given]
    if len(lengths) > 1:
        raise EdgespecError("E_SETTING", f"{where} has both {lengths[0]} and {lengths[1]}.", "Keep one of them.")
    settings: dict[str, Any] = {name: _number(name, given[name], where) for name in NUMBER_KEYS if name in given}
    if "logit_bias" in given:
        settings["logit_bias"] = _bias(given["logit_bias"], where)
    if "ignore_eos" in given:
        if not isinstance(given["ignore_eos"], bool):
            raise _wrong("ignore_eos", given["ignore_eos"], where, "Write true or false.")
        settings["ignore_eos"] = given["ignore_eos"]
    for name, value in settings.items():
        _check_sampling(name, value, where)
    if lengths:
        length = _whole_number(lengths[0], given[lengths[0]], where)
        if length < 1 and length != -1:
            raise _wrong(lengths[0], length, where, "Use 1 or more, or -1 for all that fits.")
        settings["max_new_tokens"] = length
    if "response_format" in given:
        settings["response_format"] = _response_format(given["response_format"], where)
    logprobs = _logprobs(given, where)
    if logprobs is not None:
        settings["logprobs"] = logprobs
    if "seed" in given:
        settings["seed"] = _whole_number("seed", given["seed"], where)
        if settings["seed"] < 0:
            raise _wrong("seed", given["seed"], where, "Use 0 or more.")
    if "stop" in given:
        settings["stop"] = _stop(given["stop"], where)
    if "system" in given:
        if not isinstance(given["system"], str):
            raise _wrong("system", given["system"], where, "Write the system prompt as a string.")
        settings["system"] = given["system"]
    return RowSettings(**settings)


def _number(name: str, value: object, where: str) -> float:
    if name == "top_k":
        return _whole_number(name, value, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(name, value, where, "Write a number.")
    return value


def _whole_number(name: str, value: object, where: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as some programs write them
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, where, "Write a whole number.")
    if abs(value) > MAX_SEED:
        raise _wrong(name, value, where, f"Use at most {MAX_SEED}.")
    return value


def _bias(value: object, where: str) -> dict[str, float]:
    fix = 'Write {"42": -100, " word": 5}: ids or texts of single tokens, and numbers.'
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong("logit_bias", value, where, fix)
    if any(isinstance(bias, bool) or not isinstance(bias, (int, float)) for bias in value.values()):
        raise _wrong("logit_bias", value, where, fix)
    return value


def _by_token(bias: Mapping[str, float]) -> dict[int | str, float]:
    """Return a bias by ids where its keys are such: JSON writes them as strings."""
    return {token_named(token): value for token, value in bias.items()}


def _response_format(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong("response_format", value, where, 'Write {"type": "json_object"}, or one with a json_schema.')
    try:
        response_format_grammar(value)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"{where}: {error.what}", error.fix) from error
    return value


def _logprobs(given: Mapping[str, Any], where: str) -> int | None:
    """Return how many alternatives are asked for: chats have a switch and `top_logprobs`, completions the number."""
    wanted, top = given.get("logprobs"), given.get("top_logprobs")
    if wanted is None or wanted is False:
        if top:
            raise _wrong("top_logprobs", top, where, 'Give "logprobs": true with it.')
        return None
    name = "logprobs" if wanted is not True else "top_logprobs"
    count = _whole_number(name, wanted if wanted is not True else top or 0, where)
    if not 0 <= count <= MAX_LOGPROBS:
        raise _wrong(name, count, where, f"Use 0 to {MAX_LOGPROBS}.")
    return count


def _check_sampling(name: str, value: Any, where: str) -> None:
    values: dict[str, Any] = {name: _by_token(value) if name == "logit_bias" else value}
    try:
        SamplingSettings(**values)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"{where}: {spelled(error.what, ROW_SPELLINGS)}", error.fix) from error


def _stop(value: object, where: str) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) and string for string in strings):
        raise _wrong("stop", value, where, "Write a string that is not empty, or a list of such.")
    return tuple(strings)


def _wrong(name: str, value: object, where: str, fix: str) -> EdgespecError:
    shown = repr(value)
    return EdgespecError(
        "E_SETTING", f"{where}: {name} {shown if len(shown) < 60 else shown[:60] + '…'} is wrong.", fix
    )
