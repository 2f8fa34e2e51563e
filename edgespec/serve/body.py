"""The body of a request: whole, in time, JSON, and without a field that nothing reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from edgespec.inputs import parse_json, shown
from edgespec.serve.refusal import BAD_REQUEST, TOO_LARGE, TOO_LONG, RefusalError
from edgespec.serve.settings import ServerSettings

B = TypeVar("B", bound="Fields")


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
    try:
        return kind.model_validate({name: value for name, value in body.items() if name not in describing})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"])) or "the body"
        if problem["type"] == "extra_forbidden":
            what = f"'{name}' is not known here, so it would have no effect. Leave it out."
            raise RefusalError(BAD_REQUEST, what, code="unknown_field", field=name) from error
        if problem["type"] == "missing":
            raise RefusalError(BAD_REQUEST, f"'{name}' is missing.", code="missing_field", field=name) from error
        what = f"'{name}' is {shown(problem['input'])}: {problem['msg'].removeprefix('Value error, ')}."
        raise RefusalError(BAD_REQUEST, what, code="invalid_value", field=name) from error
