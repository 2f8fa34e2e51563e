"""What a row of a prompt file sets for itself: the names, checked before a model is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.cli.spelling import spelled
from edgespec.config import MAX_SEED, SamplingSettings
from edgespec.errors import EdgespecError

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
LENGTH_KEYS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
SETTING_KEYS = {*LENGTH_KEYS, *SAMPLING_KEYS, "seed", "stop", "system"}
# Keys of other tools that would change the text, and do not here
IGNORED_KEYS = {
    "best_of",
    "frequency_penalty",
    "guided_json",
    "logit_bias",
    "min_tokens",
    "model",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
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
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    system: str | None = None

    def given(self) -> dict[str, Any]:
        """Return what the row sets, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def sampling(self) -> dict[str, Any]:
        """Return those of them that `SamplingSettings` has."""
        return {name: value for name, value in self.given().items() if name in SAMPLING_KEYS}


def parse_settings(values: Mapping[str, Any], where: str) -> RowSettings:
    """Parse the settings among a row's keys; null is not given. Raises EdgespecError with the row and the key."""
    given = {name: value for name, value in values.items() if value is not None and name in SETTING_KEYS}
    lengths = [name for name in LENGTH_KEYS if name in given]
    if len(lengths) > 1:
        raise EdgespecError("E_SETTING", f"{where} has both {lengths[0]} and {lengths[1]}.", "Keep one of them.")
    settings: dict[str, Any] = {name: _number(name, given[name], where) for name in SAMPLING_KEYS if name in given}
    for name, value in settings.items():
        _check_sampling(name, value, where)
    if lengths:
        length = _whole_number(lengths[0], given[lengths[0]], where)
        if length < 1 and length != -1:
            raise _wrong(lengths[0], length, where, "Use 1 or more, or -1 for all that fits.")
        settings["max_new_tokens"] = length
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
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, where, "Write a whole number.")
    if abs(value) > MAX_SEED:
        raise _wrong(name, value, where, f"Use at most {MAX_SEED}.")
    return value


def _check_sampling(name: str, value: float, where: str) -> None:
    try:
        SamplingSettings(**{name: value})  # type: ignore[arg-type]
    except EdgespecError as error:
        raise EdgespecError(error.code, f"{where}: {spelled(error.what, {name: name})}", error.fix) from error


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
