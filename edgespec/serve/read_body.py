"""The body of a request as it arrives: whole, in time, of a bounded size, and JSON."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from edgespec.serve.refusal import BAD_REQUEST, TOO_LARGE, TOO_LONG, UNSUPPORTED_TYPE, RefusalError
from edgespec.serve.settings import ServerSettings
from edgespec.validation import parse_json, shown

_GZIP = 16  # added to zlib's window: the wrapper of gzip


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
