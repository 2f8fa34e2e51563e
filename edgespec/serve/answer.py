"""An answer on its way to a client: as a stream of events, or whole. The client may go away at any time."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgespec.serve.refusal import RefusalError
from edgespec.serve.request_queue import PromptProgress

Parts = AsyncGenerator[Mapping[str, Any] | str | PromptProgress, None]  # what stands in a stream's lines
ErrorBody = Callable[[RefusalError], Mapping[str, Any]]
CLIENT_LEFT = 499  # as other servers note it; nobody reads it
_LINE_ENDS = "\u0085\u2028\u2029"  # for clients that break lines as Python's splitlines does: they are escaped
LOOKING_S = 0.2  # between looks whether a client is still there


def event_stream(parts: Parts) -> Response:
    """Return a stream of server-sent events; an object with a type is an event of this name."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for part in parts:
                yield _event(part)
        finally:
            await parts.aclose()

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _event(part: Mapping[str, Any] | str | PromptProgress) -> str:
    if isinstance(part, PromptProgress):  # a comment, which keeps proxies and clients from giving up
        return f": reading {part.num_read} of {part.num_all} tokens\n\n"
    if isinstance(part, str):
        return f"data: {part}\n\n"
    name = f"event: {part['type']}\n" if "type" in part else ""
    data = json.dumps(part, ensure_ascii=False)
    for end in _LINE_ENDS:
        data = data.replace(end, f"\\u{ord(end):04x}")
    return f"{name}data: {data}\n\n"


async def whole(request: Request, made: Coroutine[Any, Any, Mapping[str, Any]]) -> Response:
    """Return an answer that is sent when it is complete; a client that goes away cancels it."""
    task = asyncio.create_task(made)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=LOOKING_S)
            if not task.done() and await request.is_disconnected():
                return Response(status_code=CLIENT_LEFT)
        return JSONResponse(task.result())
    finally:
        task.cancel()


def refused(refusal: RefusalError, body: ErrorBody) -> Response:
    """Return an error as a protocol writes it."""
    return JSONResponse(body(refusal), status_code=refusal.status, headers=refusal.headers)
