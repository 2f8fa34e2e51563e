"""The fields of a request's body: typed, bounded, and without one that nothing reads."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.validation import shown

B = TypeVar("B", bound="Fields")
T = TypeVar("T")
NUMBERS = (int, float, bool)  # Python has a truth value for a number


class _FailFast(FailFast):
    """As pydantic's, and part of a union, which has to have a hash."""

    __hash__ = object.__hash__


# Of which one wrong item is enough: a body has room for very many, and each would get an error of its own
Items = Annotated[list[T], _FailFast()]


class Fields(BaseModel):
    """Fields of a body, or of an object in one: what is null or empty counts as left out, and others have to be known.

    An empty value of a field that has to be there counts, and one of `EMPTY_COUNTS`.
    """

    model_config = ConfigDict(extra="forbid")
    EMPTY_COUNTS: ClassVar[Set[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        needed = {name for name, field in known.items() if field.is_required()} | cls.EMPTY_COUNTS
        return {
            name: value
            for name, value in fields.items()
            if value is not None and (name in needed or not is_empty(value)) and (name in known or value is not False)
        }

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool):
            kinds = [kind for kind in _kinds(cls.model_fields[str(info.field_name)].annotation) if kind in NUMBERS]
            if kinds and bool not in kinds:
                raise ValueError("a number is needed here")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield a type, and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def fields_of(kind: type[B], body: Mapping[str, Any], *, location: str = "") -> B:
    """Return the fields of a body, or of an object at a place in it; raises RefusalError for one that is wrong."""
    fields = {name: value for name, value in body.items() if value is not None}
    unknown = next((name for name in fields if name not in kind.model_fields), None)
    if unknown is not None:
        raise unknown_field(location + unknown)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        found = _location(problem["loc"], fields, is_missing=problem["type"] == "missing")
        name = location + found if found else location.rstrip(".") or "the body"
        if problem["type"] == "extra_forbidden":
            raise unknown_field(name) from error
        if problem["type"] == "missing":
            raise RefusalError(BAD_REQUEST, f"'{name}' is missing.", code="missing_field", field=name) from error
        what = f"'{name}' is {shown(problem['input'])}: {problem['msg'].removeprefix('Value error, ')}."
        raise RefusalError(BAD_REQUEST, what, code="invalid_value", field=name) from error


def unknown_field(name: str) -> RefusalError:
    """Return the refusal of a field that nobody here knows."""
    what = f"'{name}' is not known here, so it would have no effect. Leave it out."
    return RefusalError(BAD_REQUEST, what, code="unknown_field", field=name)


def _location(parts: Sequence[int | str], body: Any, *, is_missing: bool) -> str:
    """Return where in a body something is wrong, without the types that pydantic tried there in turn."""
    found, value = [], body
    for number, part in enumerate(parts, 1):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            if not (is_missing and number == len(parts)):
                continue
        found.append(str(part))
    return ".".join(found)
