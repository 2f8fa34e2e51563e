"""What a row of a prompt file sets for itself: the names, checked before a model is touched."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.cli.prompts.row_keys import OPENED, SETTING_OF, opened
from edgespec.cli.prompts.template_keys import template_args
from edgespec.cli.spelling import spelled
from edgespec.config import MAX_LOGPROBS, MAX_SEED, SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.inputs import parse_json, shown
from edgespec.sampling.grammar import Grammar, response_format_grammar
from edgespec.text.bias import token_named

SAMPLING_KEYS = (
    "temperature", "do_sample", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "ignore_eos",
)  # fmt: skip
ROW_SPELLINGS = {name: name for name in (*SAMPLING_KEYS, "stop_token_ids", "suppress_tokens")}
FILLS_CONTEXT = {-1, -2}  # the latter is ollama's


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """The settings of a row; where one is None, the run's own holds."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    do_sample: bool | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    grammar: str | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    suppress_tokens: tuple[int, ...] | None = None
    skip_special_tokens: bool | None = None
    system: str | None = None
    template_args: dict[str, Any] | None = None  # what the chat template reads beside the messages

    def given(self) -> dict[str, Any]:
        """Return what the row sets, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def sampling(self) -> dict[str, Any]:
        """Return those of them that `SamplingSettings` has."""
        found = {name: value for name, value in self.given().items() if name in SAMPLING_KEYS}
        if self.logit_bias is not None:
            found["logit_bias"] = _by_token(self.logit_bias)
        return found

    @property
    def names_grammar(self) -> bool:
        """Return whether the row says what its text matches, or that it may be any."""
        return self.response_format is not None or self.grammar is not None

    @property
    def names_tokens(self) -> bool:
        """Return whether the row names tokens of the model, or does without those that end a text."""
        return bool(self.logit_bias or self.ignore_eos or self.stop_token_ids or self.suppress_tokens)

    def text_grammar(self) -> Grammar | None:
        """Return what the row's text matches; None: any text."""
        if self.grammar is not None:
            return Grammar(form="grammar", text=self.grammar)
        return None if self.response_format is None else response_format_grammar(self.response_format)


def parse_settings(row: Mapping[str, Any], where: str) -> RowSettings:
    """Parse the settings among a row's keys, by any of their names; null is not given.

    Raises EdgespecError with the row and the key, also where two names of a setting have different values.
    """
    given = [(place, name, value) for place, name, value in opened(row) if name in SETTING_OF]
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for place, name, value in given:
        setting = SETTING_OF[name]
        if setting in {"logprobs", "template_args"}:
            continue  # of several keys together
        parsed = _PARSERS[setting](name, value, where)
        if parsed is None:
            continue
        if setting in found and found[setting] != parsed:
            what = f"{where} has both {names[setting]} and {place}, which differ."
            raise EdgespecError("E_SETTING", what, "Keep one of them.")
        found[setting], names[setting] = parsed, place
    values = {name: value for _, name, value in given}
    found["template_args"] = template_args(values, where)
    logprobs = _logprobs(values, where)
    if logprobs is not None:
        found["logprobs"] = logprobs
    if "response_format" in found and "grammar" in found:
        what = f"{where} has both {names['response_format']} and {names['grammar']}."
        raise EdgespecError("E_SETTING", what, "A text has one grammar: keep one of them.")
    return RowSettings(**found)


def typed_cells(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a table's row with what is no text read as JSON: settings, and conversations."""
    return {name: _typed(cell) if name in JSON_COLUMNS else cell for name, cell in row.items()}


def _typed(cell: str) -> Any:
    try:
        return parse_json(cell)
    except ValueError:
        return cell


def _sampled(name: str, value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(name, value, where, "Write a number.")
    _check_sampling(name, value, where)
    return value


def _top_k(name: str, value: object, where: str) -> int:
    top_k = max(_whole_number(name, value, where), -2)
    _check_sampling(name, 0 if top_k == -1 else top_k, where)
    return max(top_k, 0)


def _switch(name: str, value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, where, "Write true or false.")
    return value


def _length(name: str, value: object, where: str) -> int:
    length = _whole_number(name, value, where)
    if length < 1 and length not in FILLS_CONTEXT:
        raise _wrong(name, length, where, "Use 1 or more, or -1 for all that fits.")
    return length if length > 0 else -1


def _least_length(name: str, value: object, where: str) -> int | None:
    length = _whole_number(name, value, where)
    if length < 0:
        raise _wrong(name, length, where, "Use 0 or more.")
    return length or None


def _token_ids(name: str, value: object, where: str) -> tuple[int, ...] | None:
    ids = value if isinstance(value, list) else [value]
    found = tuple(_whole_number(name, token, where) for token in ids)
    if any(token < 0 for token in found):
        raise _wrong(name, value, where, "Use ids of tokens: 0 or more.")
    return found or None


def _seed(name: str, value: object, where: str) -> int | None:
    seed = _whole_number(name, value, where)
    if seed < -1:
        raise _wrong(name, value, where, "Use 0 or more; -1 is the run's.")
    return None if seed == -1 else seed


def _system(name: str, value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, where, "Write the system prompt as a string.")
    return value


def _whole_number(name: str, value: object, where: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as some programs write them
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, where, "Write a whole number.")
    if abs(value) > MAX_SEED:
        raise _wrong(name, value, where, f"Use at most {MAX_SEED}.")
    return value


def _bias(name: str, value: object, where: str) -> dict[str, float]:
    fix = 'Write {"42": -100, " word": 5}: ids or texts of single tokens, and numbers.'
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, where, fix)
    if any(isinstance(bias, bool) or not isinstance(bias, (int, float)) for bias in value.values()):
        raise _wrong(name, value, where, fix)
    _check_sampling(name, value, where)
    return value


def _by_token(bias: Mapping[str, float]) -> dict[int | str, float]:
    """Return a bias by ids where its keys are such: JSON writes them as strings."""
    return {token_named(token): value for token, value in bias.items()}


def _response_format(name: str, value: object, where: str) -> dict[str, Any] | None:
    """Return OpenAI's form of a format that a row has in that form, or as a JSON schema."""
    if name != "response_format":
        schema = _typed(value) if isinstance(value, str) else value
        if not schema:
            return None
        value = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if not isinstance(value, dict):
        raise _wrong(name, value, where, 'Write {"type": "json_object"}, or one with a json_schema.')
    try:
        response_format_grammar(value)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"{where}: {error.what}", error.fix) from error
    return value


def _grammar(name: str, value: object, where: str) -> str | None:
    """Return a grammar of what a text is to match: a grammar itself, a regular expression, or one of some texts."""
    if not value:
        return None
    if name == "guided_choice":
        if not isinstance(value, list) or not all(isinstance(choice, str) and choice for choice in value):
            raise _wrong(name, value, where, "Write a list of texts.")
        return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
    if not isinstance(value, str):
        raise _wrong(name, value, where, "Write it as a string.")
    if name != "guided_regex":
        return value
    expression = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", value, flags=re.DOTALL).replace("\n", r"\n")
    return f"start: TEXT\nTEXT: /{expression}/"


def _logprobs(given: Mapping[str, Any], where: str) -> int | None:
    """Return how many alternatives are asked for: chats have a switch and `top_logprobs`, completions the number."""
    wanted, top = given.get("logprobs"), given.get("top_logprobs")
    if wanted is None and given.get("n_probs"):
        return _count("n_probs", given["n_probs"], where)
    if wanted is None or wanted is False:
        if top:
            raise _wrong("top_logprobs", top, where, 'Give "logprobs": true with it.')
        return None
    name = "logprobs" if wanted is not True else "top_logprobs"
    return _count(name, wanted if wanted is not True else top or 0, where)


def _count(name: str, value: object, where: str) -> int:
    count = _whole_number(name, value, where)
    if not 0 <= count <= MAX_LOGPROBS:
        raise _wrong(name, count, where, f"Use 0 to {MAX_LOGPROBS}.")
    return count


def _check_sampling(name: str, value: Any, where: str) -> None:
    setting = SETTING_OF[name]
    values: dict[str, Any] = {setting: _by_token(value) if setting == "logit_bias" else value}
    try:
        SamplingSettings(**values)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"{where}: {spelled(error.what, {setting: name})}", error.fix) from error


def _stop(name: str, value: object, where: str) -> tuple[str, ...] | None:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) and string for string in strings):
        raise _wrong(name, value, where, "Write a string that is not empty, or a list of such.")
    return tuple(strings) if strings or name == "stop" else None


def _wrong(name: str, value: object, where: str, fix: str) -> EdgespecError:
    return EdgespecError("E_SETTING", f"{where}: {name} {shown(value)} is wrong.", fix)


_PARSERS: dict[str, Callable[[str, object, str], Any]] = {
    "max_new_tokens": _length,
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), _sampled
    ),
    "min_new_tokens": _least_length,
    "top_k": _top_k,
    "do_sample": _switch,
    "ignore_eos": _switch,
    "logit_bias": _bias,
    "response_format": _response_format,
    "grammar": _grammar,
    "seed": _seed,
    "stop": _stop,
    "skip_special_tokens": _switch,
    "stop_token_ids": _token_ids,
    "suppress_tokens": _token_ids,
    "system": _system,
}
# Columns of tables that are no text themselves
JSON_COLUMNS = frozenset({"messages", "turns", "body", *OPENED} | {
    name for name, setting in SETTING_OF.items() if setting not in {"stop", "system", "grammar"}
})  # fmt: skip
