"""The user's configuration: TOML files with defaults, sampling settings and names for pairs.

Keys are the long flags' names. The command line knows which ones there are and what their values mean, and
passes that in. Files are layers: where two set the same key, the first counts. A model and what belongs
to it (its draft, their revisions) is taken from one layer.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.hub.names import alias_in

SECTIONS = ("defaults", "models", "sampling")
PAIR_KEYS = ("model", "draft_model", "revision", "draft_revision")
PAIR_SPELLINGS = {
    **{key: key for key in PAIR_KEYS},
    **dict.fromkeys(("draft", "model_draft", "assistant_model"), "draft_model"),
}
Value = str | int | float | bool | list[str | int | float] | dict[str, str | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """The keys that may stand in a file."""

    spellings: Mapping[str, str]  # every accepted spelling -> the key's own name
    sampling: frozenset[str]  # keys that belong to [sampling]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and where it was found."""

    value: Value
    origin: str  # for messages: the file and the section


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A file of the configuration, checked."""

    path: Path
    defaults: Mapping[str, Value]
    sampling: Mapping[str, Value]
    models: Mapping[str, Mapping[str, Value]]  # a name for a pair -> its model, draft and settings


@dataclass(frozen=True, slots=True, kw_only=True)
class UserConfig:
    """All files of the configuration together, the one that counts most first."""

    files: tuple[ConfigFile, ...] = ()

    @property
    def aliases(self) -> dict[str, str]:
        """Return the names for models, and what they stand for."""
        return {name: str(entry["model"]) for file in reversed(self.files) for name, entry in file.models.items()}

    def settings(self, model: str | None) -> dict[str, Setting]:
        """Return every value that is set, by key; `model` is the model that was asked for, None where none was.

        Where none was, the configuration's own model and draft are among the values. An alias brings the
        settings of its table.
        """
        found: dict[str, Setting] = {}
        for file in reversed(self.files):
            if "model" in file.defaults:
                _drop_pair(found)
            for section in ("defaults", "sampling"):
                found |= _settings(getattr(file, section), f"'{file.path}' [{section}]")
        if model is not None:
            _drop_pair(found)
        elif "model" in found:
            model = str(found["model"].value)
        if model is None:
            return found
        for file in self.files:
            alias = alias_in(model, file.models)
            if alias is not None:
                entry = {key: value for key, value in file.models[alias].items() if key != "model"}
                return found | _settings(entry, f"'{file.path}' [models.{alias}]")
        return found


def read_config(path: Path, known: KnownKeys) -> ConfigFile:
    """Read and check a file; raises EdgespecError that names the wrong key."""
    content = _read_toml(path)
    for section, values in content.items():
        if section not in SECTIONS:
            near = _closest(section, SECTIONS)
            raise _wrong(
                path, f"there is no section [{section}]", f"Use [defaults], [sampling] or [models.NAME].{near}"
            )
        if not isinstance(values, dict):
            raise _wrong(path, f"{section} is no section", f"Write [{section}] and a line for each key.")
    defaults = _table(path, "defaults", content.get("defaults", {}), known)
    return ConfigFile(
        path=path,
        defaults=defaults,
        sampling=_table(path, "sampling", content.get("sampling", {}), known),
        models={str(name): _pair(path, str(name), entry, known) for name, entry in content.get("models", {}).items()},
    )


def read_pairs(path: Path) -> dict[str, dict[str, str]]:
    """Return the `PAIR_KEYS` of every [models.NAME]; other settings are the command line's. Raises EdgespecError."""
    tables = _read_toml(path).get("models", {})
    if not isinstance(tables, dict):
        raise _wrong(path, "models is no section", "Write [models.NAME] and a line for each key.")
    found = {}
    for name, entry in tables.items():
        _check_entry(path, name, entry)
        spelled = {PAIR_SPELLINGS.get(key.replace("-", "_")): value for key, value in entry.items()}
        pair = {key: value for key, value in spelled.items() if key is not None and isinstance(value, str)}
        _check_model(path, name, pair)
        found[name] = pair
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise EdgespecError(
            "E_FILE_NOT_FOUND", f"there is no configuration file '{path}'.", "Make one: edgespec config init."
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not TOML, an endless number
        raise EdgespecError(
            "E_USER_CONFIG", f"'{path}' cannot be read as TOML ({error}).", "Correct it, or see: edgespec config init."
        ) from error


def _pair(path: Path, name: str, entry: Any, known: KnownKeys) -> dict[str, Value]:
    _check_entry(path, name, entry)
    pair = _table(path, f"models.{name}", entry, known)
    _check_model(path, name, pair)
    return pair


def _check_entry(path: Path, name: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise _wrong(path, f"models.{name} is no section", f"Write [models.{name}] and a line for each key.")


def _check_model(path: Path, name: str, pair: Mapping[str, Value]) -> None:
    if not isinstance(pair.get("model"), str) or not pair["model"]:
        raise _wrong(path, f"[models.{name}] names no model", 'Add a line: model = "FOLDER or name".')


def _table(path: Path, section: str, entries: Mapping[str, Any], known: KnownKeys) -> dict[str, Value]:
    """Return one section with its keys under their own names."""
    found: dict[str, Value] = {}
    for written, value in entries.items():
        spelling = str(written).replace("-", "_")
        key = known.spellings.get(spelling)
        if key is None:
            near = _closest(spelling, known.sampling if section == "sampling" else known.spellings)
            raise _wrong(path, f"[{section}] has '{written}', which is no setting", f"Leave it out.{near}")
        if section == "sampling" and key not in known.sampling:
            raise _wrong(path, f"[sampling] has '{written}', which is not about sampling", "Put it into [defaults].")
        if section == "defaults" and key in known.sampling:
            raise _wrong(path, f"[defaults] has '{written}'", "Put it into [sampling].")
        if key in found:
            raise _wrong(path, f"[{section}] has '{key}' twice, once as '{written}'", "Leave one out.")
        if not _is_value(value):
            what = f"[{section}] {written} is neither text, number, true, false, nor a list or table of them"
            raise _wrong(path, what, "Write one.")
        if "\0" in str(value):  # no command line can hold one, and no path
            raise _wrong(path, f"[{section}] {written} holds a zero byte", "Leave it out.")
        found[key] = value
    if section == "defaults" and "model" not in found:
        lonely = next((key for key in PAIR_KEYS if key in found), None)
        if lonely is not None:
            raise _wrong(
                path, f"[defaults] has '{lonely}' and no model that it belongs to", "Add model, or leave it out."
            )
    return found


def _is_value(value: object) -> bool:
    if isinstance(value, list | dict):
        items = value.values() if isinstance(value, dict) else value
        return all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items)
    return isinstance(value, str | int | float)  # true and false are ints


def _settings(values: Mapping[str, Value], origin: str) -> dict[str, Setting]:
    return {key: Setting(value=value, origin=origin) for key, value in values.items()}


def _drop_pair(found: dict[str, Setting]) -> None:
    for key in PAIR_KEYS:
        found.pop(key, None)


def _wrong(path: Path, what: str, fix: str) -> EdgespecError:
    return EdgespecError("E_USER_CONFIG", f"'{path}': {what}.", fix)


def _closest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""
