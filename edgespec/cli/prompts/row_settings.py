"""What a row of a prompt file sets for itself: the names, checked before a model is touched."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from edgespec.cli.prompts.row_keys import OPENED, SETTING_OF, SETTINGS, opened
from edgespec.cli.spelling import spelled
from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import Grammar, choice_grammar, regex_grammar, response_format_grammar
from edgespec.text.bias import token_named
from edgespec.validation import json_or_text, read_as, shown

if TYPE_CHECKING:
    from edgespec.cli.prompts.row_types import (
        Adapters,
        Least,
        Length,
        Number,
        NumLikely,
        Seed,
        Texts,
        TokenIds,
        TopK,
        Unbounded,
    )

SAMPLING_KEYS = (
    "temperature", "do_sample", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "ignore_eos",
)  # fmt: skip
# What a row gives to the chat template: an object, and keys that count above it; an empty list is none
TEMPLATE_OBJECTS = ("template_args", "chat_template_kwargs")
TEMPLATE_KEYS = ("documents", "reasoning_effort", "tools")
ROW_SPELLINGS = {name: name for name in (*SAMPLING_KEYS, "stop_token_ids", "suppress_tokens")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """The settings of a row; where one is None, the run's own holds."""

    max_new_tokens: Length | None = None
    min_new_tokens: Least | None = None
    temperature: Number | None = None
    do_sample: bool | None = None
    top_p: Number | None = None
    top_k: TopK | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    grammar: str | None = None
    logprobs: NumLikely | None = None
    prompt_logprobs: NumLikely | None = None
    seed: Seed | None = None
    stop: Texts | None = None
    stop_token_ids: TokenIds | None = None
    suppress_tokens: TokenIds | None = None
    skip_special_tokens: bool | None = None
    system: str | None = None
    template_args: dict[str, Any] | None = None  # what the chat template reads beside the messages
    continue_final_message: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_budget: Unbounded | None = None
    adapter: Adapters | None = None  # names, or pairs of name and scale; (): none

    def set_values(self) -> dict[str, Any]:
        """Return what the row sets, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def sampling(self) -> dict[str, Any]:
        """Return those of them that `SamplingSettings` has."""
        found = {name: value for name, value in self.set_values().items() if name in SAMPLING_KEYS}
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

    @property
    def names_tools(self) -> bool:
        """Return whether the row has tools, or says which of them has to be called."""
        return self.tool_choice is not None or "tools" in (self.template_args or {})

    def text_grammar(self) -> Grammar | None:
        """Return what the row's text matches; None: any text."""
        if self.grammar is not None:
            return Grammar(form="grammar", text=self.grammar)
        return None if self.response_format is None else response_format_grammar(self.response_format)


def parse_settings(row: Mapping[str, Any], where: str) -> RowSettings:
    """Parse the settings among a row's keys, by any of their names; null is not given.

    Raises EdgespecError with the row and the key, also where two names of a setting have different values.
    """
    fields = [(location, name, value) for location, name, value in opened(row) if name in SETTING_OF]
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for location, name, value in fields:
        setting = SETTING_OF[name]
        if setting in {"logprobs", "template_args"}:
            continue  # of several keys together
        parsed = _read(setting, name, value, where)
        if parsed is None or (parsed == () and name != "stop" and setting != "adapter"):
            continue
        if setting in found and found[setting] != parsed:
            what = f"{where} has both {names[setting]} and {location}, which differ."
            raise EdgespecError("E_SETTING", what, "Keep one of them.")
        found[setting], names[setting] = parsed, location
    values = {name: value for _, name, value in fields}
    found["template_args"] = _template_args(values, where)
    logprobs = _logprobs(values, where)
    if logprobs is not None:
        found["logprobs"] = logprobs
    if found.get("max_new_tokens") == 0 and "prompt_logprobs" not in found:
        fix = "Write 1 or more, -1 for all that fits, or 0 beside prompt_logprobs."
        raise _wrong(names["max_new_tokens"], 0, where, fix)
    if "response_format" in found and "grammar" in found:
        what = f"{where} has both {names['response_format']} and {names['grammar']}."
        raise EdgespecError("E_SETTING", what, "A text has one grammar: keep one of them.")
    return RowSettings(**found)


def typed_cells(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a table's row with its settings and conversations read as JSON."""
    return {name: json_or_text(cell) if name in JSON_COLUMNS else cell for name, cell in row.items()}


def _read(setting: str, name: str, value: Any, where: str) -> Any:
    """Return a key's value as the setting has it; None says nothing. Raises EdgespecError."""
    if setting == "response_format":
        return _response_format(name, value, where)
    if setting == "grammar":
        return _grammar(name, value, where)

    if setting == "adapter" and value is None:
        return ()

    def wrong(key: str, problem: str) -> EdgespecError:
        location = f"{name}.{key}" if key and isinstance(value, list | dict) else name
        fix = f"Correct it, or leave it out ({SETTINGS[setting].means.replace('`', '')})."
        return EdgespecError("E_SETTING", f"{where}: {location} {problem}.", fix)

    read = read_as(_types()[setting], value, wrong)
    if setting in SAMPLING_KEYS and setting != "do_sample":
        _check_sampling(name, read, where)
    return read


@functools.cache
def _types() -> dict[str, Any]:
    """Return what each setting's value may be."""
    from edgespec.cli.prompts import row_types  # here, because `--help` has no time for pydantic

    return get_type_hints(RowSettings, vars(row_types), include_extras=True)


def _by_token(bias: Mapping[str, float]) -> dict[int | str, float]:
    """Return a bias by ids where its keys are such: JSON writes them as strings."""
    return {token_named(token): value for token, value in bias.items()}


def _response_format(name: str, value: object, where: str) -> dict[str, Any] | None:
    """Return OpenAI's form of a format that a row has in that form, or as a JSON schema."""
    if name != "response_format":
        schema = json_or_text(value) if isinstance(value, str) else value
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
        return choice_grammar(value)
    if not isinstance(value, str):
        raise _wrong(name, value, where, "Write it as a string.")
    return regex_grammar(value) if name == "guided_regex" else value


def _logprobs(fields: Mapping[str, Any], where: str) -> int | None:
    """Return how many alternatives the row sets: chats have a switch and `top_logprobs`, completions the number."""
    switch, top = fields.get("logprobs"), fields.get("top_logprobs")
    count: int | None = None
    if switch is None and fields.get("n_probs"):
        count = _read("logprobs", "n_probs", fields["n_probs"], where)
    elif switch is True:
        count = _read("logprobs", "top_logprobs", top or 0, where)
    elif switch is not None and switch is not False:
        count = _read("logprobs", "logprobs", switch, where)
    elif top:
        raise _wrong("top_logprobs", top, where, 'Give "logprobs": true with it.')
    return count


def _template_args(fields: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return what the chat template reads beside the messages."""
    found: dict[str, Any] = {}
    for name in TEMPLATE_OBJECTS:
        value = fields.get(name, {})
        if not isinstance(value, dict):
            raise _wrong(name, value, where, 'Write an object, as {"enable_thinking": false}.')
        found |= value
    return found | {name: fields[name] for name in TEMPLATE_KEYS if fields.get(name)} or None


def _check_sampling(name: str, value: Any, where: str) -> None:
    setting = SETTING_OF[name]
    values: dict[str, Any] = {setting: _by_token(value) if setting == "logit_bias" else value}
    try:
        SamplingSettings(**values)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"{where}: {spelled(error.what, {setting: name})}", error.fix) from error


def _wrong(name: str, value: object, where: str, fix: str) -> EdgespecError:
    return EdgespecError("E_SETTING", f"{where}: {name} {shown(value)} is wrong.", fix)


# Columns of tables that are no text themselves
JSON_COLUMNS = frozenset({"messages", "turns", "body", *OPENED} | {
    name for name, setting in SETTING_OF.items() if setting not in {"stop", "system", "grammar"}
})  # fmt: skip
