"""A call as clients read it: a name, and an object of arguments. What a model writes is often something else.

Families whose calls are XML write each value as text: its type is the one that the tool's schema has for it.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from edgespec.validation import parse_json

METADATA = {"id", "type"}  # that some families write beside a call, and that clients get from elsewhere
_HALF = re.compile("[\ud800-\udfff]")  # of a character, which no text can hold
_TRUTH = {"true": True, "false": False, "1": True, "0": False}
_TYPES = ("null", "integer", "number", "boolean", "object", "array")  # a text that may be one of these is no text
KINDS = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
          dict: "object"}  # fmt: skip
_MAX_DIGITS = 4000  # of a whole number; Python reads few more
_MAX_PARTS = 256  # of one schema: those that refer to themselves have no end


class SaidText(str):
    """A value of which the model says that it is a text, as its schema may have it."""

    __slots__ = ()


def call_values(function: Any, schemas: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a call's name, its arguments as JSON of an object, and what was written beside them.

    Raises ValueError where it is no call.
    """
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call has no name")
    key_of_arguments = next((key for key in ("arguments", "parameters") if key in function), "arguments")
    found = _object(function.get(key_of_arguments))
    typed = typed_values(found, schemas.get(name.strip(), {}))
    others = {key: value for key, value in function.items() if key not in METADATA | {"name", key_of_arguments}}
    return _written(name.strip()), _written(typed), _written(others) if others else ""


def read_call(text: str) -> tuple[Any, str]:
    """Return what a call's JSON says, of a key that comes twice the last value, and the earlier ones for people.

    Numbers that no float can hold are the largest one. Raises ValueError where it is no JSON.
    """
    earlier = list[Any]()

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict[str, Any]()
        for key, value in pairs:
            earlier.extend([{key: found[key]}] if key in found else [])
            found[key] = value
        return found

    value = parse_json(text, is_strict=True, object_pairs_hook=as_object, parse_float=_number, parse_int=_number)
    return value, "".join(map(_written, earlier))


def _number(text: str) -> int | float:
    if text.lstrip("-").isdigit() and len(text) <= _MAX_DIGITS:
        return int(text)
    return min(max(float(text), -1 * sys.float_info.max), sys.float_info.max)


def _written(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _HALF.sub("\ufffd", text)


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = parse_json(value, is_strict=True) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("a call's arguments are no object")
    return value


def typed_values(values: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """Return values with those that are text in the types that a schema has for them."""
    return {
        key: _typed(value, parts_of(schema, schema, key)) if isinstance(value, str) else value
        for key, value in values.items()
    }


def parts_of(schema: Any, root: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the parts of the schema of a key."""
    parts = list(schema_parts(schema, root))
    own = [part["properties"][key] for part in parts if key in _mapping(part.get("properties"))]
    patterns = [(name, value) for part in parts for name, value in _mapping(part.get("patternProperties")).items()]
    own = own or [value for name, value in patterns if _matches(name, key)]
    own = own or [part["additionalProperties"] for part in parts if "additionalProperties" in part]
    return [found for value in own for found in schema_parts(value, root)]


def schema_parts(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and those that it refers to or is made of."""
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < _MAX_PARTS:
        part = waiting.pop(0)
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting.append(referred(part.get("$ref", part.get("$dynamicRef")), root))
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += part[name] if isinstance(part.get(name), list) else []


def referred(reference: Any, root: Any) -> Any:
    """Return what a reference within a schema names; None where it is none."""
    if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
        return None
    found = root
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = _mapping(found).get(step)
    return found


def _matches(pattern: str, key: str) -> bool:
    try:
        return re.search(pattern, key) is not None
    except re.error:
        return False


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _typed(text: str, parts: list[Mapping[str, Any]]) -> Any:
    """Return a value that was written as text: as the schema's parts have it, else the text."""
    kinds, chosen = set[str](), list[Any]()
    for part in parts:
        named = part.get("type")
        kinds |= {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
        kinds |= {"null"} if part.get("nullable") is True else set()
        chosen += part["enum"] if isinstance(part.get("enum"), list) else []
        chosen += [part["const"]] if "const" in part else []
    if text in [value for value in chosen if isinstance(value, str)] or (
        isinstance(text, SaidText) and "string" in kinds
    ):
        return text
    kinds |= {KINDS[type(value)] for value in chosen if type(value) in KINDS}
    for kind in _TYPES:
        if kind in kinds:
            try:
                return _read(text.strip(), kind)
            except (ValueError, OverflowError):
                continue
    return text


def _read(text: str, kind: str) -> Any:
    if kind == "boolean":
        if text.lower() not in _TRUTH:
            raise ValueError(text)
        return _TRUTH[text.lower()]
    value, earlier = (None, "") if text == "None" else read_call(text)
    if earlier:  # nothing is lost
        raise ValueError(text)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)  # as JSON schemas have it
    found = KINDS[type(value)]
    if found != kind and not (kind == "number" and found == "integer"):
        raise ValueError(text)
    return value
