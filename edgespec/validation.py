"""What comes from outside is of the kind that it should be: values of settings and options, texts, JSON."""

from __future__ import annotations

import builtins
import collections.abc
import contextlib
import functools
import json
import numbers
import pathlib
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

MAX_SHOWN = 60  # characters of a wrong value
MAX_WHOLE = 2**63 - 1  # of whole numbers, either way
WORDS: dict[Any, str] = {
    int: "a whole number below 2^63", float: "a number", bool: "True or False", str: "a text", Path: "a path",
    Mapping: "a mapping", collections.abc.Sequence: "a list", tuple: "a list",
}  # fmt: skip
# pydantic's names of problems -> what may stand there
ALLOWED = {
    "bool_type": "true or false", "int_type": "a whole number", "float_type": "a finite number",
    "finite_number": "a finite number", "string_type": "a text", "list_type": "a list", "tuple_type": "a list",
    "dict_type": "an object", "dataclass_type": "an object",
    "date_type": "a day as 2026-11-25", "date_parsing": "a day as 2026-11-25",
    "string_too_short": "a text that says something", "too_short": "a list that holds something",
}  # fmt: skip


def parse_json(text: str | bytes, *, is_strict: bool = False, **hooks: Callable[[Any], Any]) -> Any:
    """Return what JSON says; raises ValueError for all that is none, lists in lists without end among it.

    Infinities and NaN, which are no JSON, are taken as Python writes them, and so is a key that comes twice, unless it
    `is_strict`. The `hooks` are json.loads's.
    """
    try:
        strict: Any = {"parse_constant": _refuse_constant, "object_pairs_hook": _with_keys_once} if is_strict else {}
        return json.loads(text, **{**strict, **hooks})
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_or_text(text: str, *, is_strict: bool = False) -> Any:
    """Return what JSON says, or the text itself where it is none."""
    try:
        return parse_json(text, is_strict=is_strict)
    except ValueError:
        return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {shown(twice)} twice")
    return found


def read_as(kind: type[T], content: object, wrong: Callable[[str, str], EdgespecError]) -> T:
    """Return what JSON or TOML says as one of a type, strictly: a record has all keys of its fields, and no others.

    The first problem is raised: `wrong` makes the error of a key as 'layers.0.bias', which is empty for the whole,
    and of the problem there, as 'is missing' or "'x' is not a text".
    """
    from pydantic import ValidationError  # here, because a help text has no time for it

    try:
        # As JSON once more, in which lists are tuples and objects are records
        of: Any = kind
        adapter: TypeAdapter[T] = _adapter(of)
        return adapter.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise wrong(".".join(map(str, problem["loc"])), _in_sentence(dict(problem))) from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _in_sentence(problem: Mapping[str, Any]) -> str:
    context = problem.get("ctx", {})
    match problem["type"]:
        case "missing":
            return "is missing"
        case "unexpected_keyword_argument":
            return "is unknown"
        case "json_invalid":
            return f"is not JSON: {context['error']}"
        case "greater_than_equal":
            allowed = f"{context['ge']} or more"
        case "less_than_equal":
            allowed = f"{context['le']} or less"
        case "greater_than":
            allowed = f"above {context['gt']:g}"
        case "literal_error":
            allowed = context["expected"]
        case "value_error":
            allowed = str(context["error"])
        case other:
            allowed = ALLOWED.get(other, problem["msg"])
    return f"{shown(problem['input'])} is not {allowed}"


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a text that can be encoded: half a surrogate pair is no character."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a finite number that a float can hold, and not True or False."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, numbers.Real) and abs(float(value)) <= sys.float_info.max


def shown(value: object) -> str:
    """Return a value for a message, in short."""
    try:
        text = repr(value)
    except ValueError:  # of a number of more digits than Python writes
        text = f"{type(value).__name__} too long to be written"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def check_kinds(settings: object) -> None:
    """Give a frozen record's values the types of its fields; raises EdgespecError for one of another kind."""
    owner: type = type(settings)
    for name, kind in _hints(owner).items():
        object.__setattr__(settings, name, checked(name, getattr(settings, name), kind))


def checked_options(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in the types that a TypedDict has for them, without those that are None.

    Raises EdgespecError for one of another kind, and TypeError for an unknown name.
    """
    hints = _hints(kind)
    unknown = next((name for name in options if name not in hints), None)
    if unknown is not None:
        raise TypeError(f"there is no option '{unknown}', only {', '.join(hints)}")
    return {name: checked(name, value, hints[name]) for name, value in options.items() if value is not None}


def checked(name: str, value: object, kind: Any) -> Any:
    """Return a setting's value as one of its type, a whole float as an int; raises EdgespecError where it is none."""
    try:
        return _fitted(value, kind)
    except TypeError as error:
        what = f"`{name}={shown(value)}` cannot be used."
        raise EdgespecError("E_SETTING", what, f"Give {_in_words(kind)}.") from error


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fitted(value: Any, kind: Any) -> Any:
    """Return a value as one of a type; raises TypeError where it is none."""
    parts = typing.get_args(kind)
    match typing.get_origin(kind) or kind:
        case typing.Union | types.UnionType:
            return _fitted_to_any(value, parts)
        case typing.Literal:  # the caller, which has the list, checks the value itself
            return _if(type(value) in map(type, parts), value)
        case builtins.int:
            return whole(value)
        case builtins.float:  # the caller, which knows the range, refuses NaN and infinities
            _if(isinstance(value, float) or is_finite(value), value)
            return value if isinstance(value, int | float) else float(value)
        case builtins.str:
            return _if(is_text(value), value)
        case pathlib.Path:
            return Path(_if(isinstance(value, Path) or is_text(value), value))
        case collections.abc.Mapping | builtins.dict:
            _if(isinstance(value, Mapping), value)
            return {_fitted(key, parts[0]): _fitted(part, parts[1]) for key, part in value.items()}
        case collections.abc.Sequence:
            _if(isinstance(value, list | tuple), value)
            return [_fitted(part, parts[0]) for part in value]
        case builtins.tuple:
            _if(isinstance(value, list | tuple), value)
            kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
            return tuple(
                _fitted(part, kind) for part, kind in zip(value, _if(len(kinds) == len(value), kinds), strict=True)
            )
        case typing.Any:
            return value
        case other:
            return _if(isinstance(value, other), value)


def _fitted_to_any(value: object, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        with contextlib.suppress(TypeError):
            return _fitted(value, kind)
    raise TypeError


def whole(value: Any) -> int:
    """Return a whole number below 2^63, also of a float; raises TypeError for all else."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return int(_if(is_real and value == value // 1 and abs(value) <= MAX_WHOLE, value))


def _if(fits: bool, value: Any) -> Any:
    if not fits:
        raise TypeError
    return value


def _in_words(kind: Any) -> str:
    """Return a type for a message: 'a whole number or None'."""
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, parts)))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, parts))}"
    return (
        "None" if origin is types.NoneType else WORDS.get(origin, f"an object of {getattr(origin, '__name__', origin)}")
    )


def first_line(error: Exception) -> str:
    """Return what a library says went wrong, in short; a line that ends with a colon says nothing by itself."""
    first, *more = [*map(str.strip, str(error).strip().splitlines()), ""]
    return (f"{first} {more[0]}" if first.endswith(":") else first or type(error).__name__)[:200]
