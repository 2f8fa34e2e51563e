"""The types of `RowSettings`: what their values may be, and what the values of other tools mean here."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from edgespec.config import MAX_LOGPROBS
from edgespec.validation import is_finite, whole

FILLS_CONTEXT = {-1, -2}  # the latter is ollama's


def _number(value: Any) -> float:
    if not is_finite(value):
        raise ValueError("a finite number")
    return value  # a whole one as it was written, as the digest of a row has it


def _whole(value: Any) -> int:
    try:
        return whole(value)
    except TypeError as error:
        raise ValueError("a whole number below 2^63") from error


def _length(value: int) -> int:
    if value < 0 and value not in FILLS_CONTEXT:
        raise ValueError("0 or more, or -1 for all that fits")
    return max(value, -1)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _texts(value: Any) -> tuple[Any, ...]:
    return tuple(text for text in _several(value) if text != "")  # which clients send for "none"


def _adapters(value: Any) -> tuple[str | tuple[str, float], ...]:
    """Return the names that a value has, with the scales that it has."""
    if value is None or value in ("", [], {}):
        return ()
    parts = list(value.items()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    pairs = [(part, None) if isinstance(part, str) else part for part in parts]
    if not all(isinstance(part, list | tuple) and len(part) == 2 and isinstance(part[0], str) for part in pairs):
        raise ValueError("a name, a list of names, or names with their scales")
    if not all(scale is None or is_finite(scale) for _, scale in pairs):
        raise ValueError("names with scales that are finite numbers")
    return tuple(name if scale is None else (name, scale) for name, scale in pairs)


Number = Annotated[float, PlainValidator(_number)]
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=0)]
TokenIds = Annotated[tuple[Count, ...], BeforeValidator(_several)]

Length = Annotated[Whole, AfterValidator(_length)]
Least = Annotated[Count, AfterValidator(lambda count: count or None)]
TopK = Annotated[Whole, AfterValidator(lambda count: 0 if count == -1 else count)]
NumLikely = Annotated[Count, Field(le=MAX_LOGPROBS)]
Seed = Annotated[Whole, Field(ge=-1), AfterValidator(lambda seed: None if seed == -1 else seed)]
Unbounded = Annotated[Whole, Field(ge=-1)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Adapters = Annotated[tuple[Any, ...], PlainValidator(_adapters)]
