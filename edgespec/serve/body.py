"""The body of a request: whole, in time, JSON, and without a field that nothing reads."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from edgespec.serve.refusal import BAD_REQUEST, TOO_LARGE, TOO_LONG, UNSUPPORTED_TYPE, RefusalError
from edgespec.serve.settings import ServerSettings
from edgespec.validation import parse_json, shown

B = TypeVar("B", bound="Fields")
T = TypeVar("T")
_GZIP = 16  # added to zlib's window: the wrapper of gzip


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


def is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """Return the object that a request's body is; raises RefusalError for one that is too large, too slow, or none."""
    most = settings.max_body_bytes
    content, unpacked = bytearray(), _unpacking(request.headers.get("content-encoding", ""), most)
    try:
        async with asyncio.timeout(settings.body_s):
            async for part in request.stream():
                content += unpacked(part)
                if len(content) > most:
                    raise RefusalError(TOO_LARGE, f"the body has more than {most} bytes.", code="body_too_large")
    except TimeoutError:
        what = f"the body did not arrive within {settings.body_s:g} s."
        raise RefusalError(TOO_LONG, what, code="body_too_slow") from None
    except ClientDisconnect:
        raise RefusalError(BAD_REQUEST, "the body ended early.", code="body_cut_off") from None
    try:
        found = parse_json(bytes(content), is_strict=True)
    except ValueError as error:  # no UTF-8 among it, or gzip that was cut
        raise RefusalError(BAD_REQUEST, f"the body is not JSON: {error}.", code="invalid_json") from error
    if not isinstance(found, dict):
        raise RefusalError(BAD_REQUEST, f"the body is {shown(found)}, and no JSON object.", code="invalid_json")
    return found


def _unpacking(encoding: str, most: int) -> Callable[[bytes], bytes]:
    """Return what makes parts of a body plain; raises RefusalError for an encoding that is not read.

    No part becomes longer than `most` bytes and one, however well it is packed.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return lambda part: part
    if encoding not in ("gzip", "x-gzip"):
        what = f"a body in the encoding {shown(encoding)} is not read. Send it as it is, or as gzip."
        raise RefusalError(UNSUPPORTED_TYPE, what, code="unsupported_encoding")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | _GZIP)

    def unpacked(part: bytes) -> bytes:
        try:
            found = unpacker.decompress(part, most + 1)
            if unpacker.unused_data:
                raise zlib.error("more follows its end")
        except zlib.error as error:
            raise RefusalError(BAD_REQUEST, f"the body is not gzip: {error}.", code="invalid_encoding") from error
        return found

    return unpacked


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
