"""The body of a request: whole, in time, JSON, and without a field that nothing reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from edgespec.inputs import parse_json, shown
from edgespec.serve.refusal import BAD_REQUEST, TOO_LARGE, TOO_LONG, RefusalError
from edgespec.serve.settings import ServerSettings

B = TypeVar("B", bound="Fields")
T = TypeVar("T")


class _FailFast(FailFast):
    """As pydantic's, and part of a union, which has to have a hash."""

    __hash__ = object.__hash__


# Of which one wrong item is enough: a body has room for very many, and each would get an error of its own
Items = Annotated[list[T], _FailFast()]


class Fields(BaseModel):
    """Fields of a body, or of an object in one; those that are null count as left out, and others have to be known."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None}


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """Return the object that a request's body is; raises RefusalError for one that is too large, too slow, or none."""
    most = settings.max_body_bytes
    content = bytearray()
    try:
        async with asyncio.timeout(settings.body_s):
            async for part in request.stream():
                content += part
                if len(content) > most:
                    raise RefusalError(TOO_LARGE, f"the body has more than {most} bytes.", code="body_too_large")
    except TimeoutError:
        what = f"the body did not arrive within {settings.body_s:g} s."
        raise RefusalError(TOO_LONG, what, code="body_too_slow") from None
    except ClientDisconnect:
        raise RefusalError(BAD_REQUEST, "the body ended early.", code="body_cut_off") from None
    try:
        found = parse_json(bytes(content), is_strict=True)
    except ValueError as error:  # no UTF-8 among it
        raise RefusalError(BAD_REQUEST, f"the body is not JSON: {error}.", code="invalid_json") from error
    if not isinstance(found, dict):
        raise RefusalError(BAD_REQUEST, f"the body is {shown(found)}, and no JSON object.", code="invalid_json")
    return found


def fields_of(kind: type[B], body: Mapping[str, Any], *, describing: Set[str] = frozenset()) -> B:
    """Return the fields of a body; raises RefusalError for one that is unknown or wrong.

    Those that only describe the request are taken, and say nothing here.
    """
    given = {name: value for name, value in body.items() if name not in describing and value is not None}
    unknown = next((name for name in given if name not in kind.model_fields), None)
    if unknown is not None:
        raise _unknown(unknown)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = _place(problem["loc"], given, is_missing=problem["type"] == "missing") or "the body"
        if problem["type"] == "extra_forbidden":
            raise _unknown(name) from error
        if problem["type"] == "missing":
            raise RefusalError(BAD_REQUEST, f"'{name}' is missing.", code="missing_field", field=name) from error
        what = f"'{name}' is {shown(problem['input'])}: {problem['msg'].removeprefix('Value error, ')}."
        raise RefusalError(BAD_REQUEST, what, code="invalid_value", field=name) from error


def _unknown(name: str) -> RefusalError:
    what = f"'{name}' is not known here, so it would have no effect. Leave it out."
    return RefusalError(BAD_REQUEST, what, code="unknown_field", field=name)


def _place(parts: Sequence[int | str], body: Any, *, is_missing: bool) -> str:
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
