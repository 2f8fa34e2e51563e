"""Who may ask: the address that they call, the page that they are on, and the key that they have.

A page from elsewhere may send requests to a local address, also under a name of its own that it has pointed there
(DNS rebinding). So the name that was called, and the page's origin where a browser says it, have to be ours.
"""

import hmac
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.serve.answer import ErrorBody, refused
from edgespec.serve.page_files import FILES
from edgespec.serve.refusal import FORBIDDEN, TOO_LARGE, UNAUTHORIZED, RefusalError
from edgespec.serve.settings import LOOPBACK, ServerSettings

OPEN_PATHS = {"/health", *FILES}  # which say nothing of texts
HEADER_FIELDS_TOO_LARGE = 431
NO_SNIFFING = (b"x-content-type-options", b"nosniff")  # markup in an answer makes it no page


class Guard:
    """ASGI middleware that refuses requests before anything reads them."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, error_body: Callable[[str], ErrorBody]) -> None:
        self._app, self._settings, self._error_body = app, settings, error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or answer with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        try:
            self._check_size(scope, headers)
            self._check_host(headers)
            is_foreign = bool(origin) and not self._is_own(origin, headers)
            if is_foreign and origin not in self._settings.allowed_origins:
                what = f"the page '{origin[:80]}' may not ask here. Start with `allow_origin`, if it should."
                raise RefusalError(FORBIDDEN, what, code="foreign_origin")
            if is_foreign and scope["method"] == "OPTIONS":
                await _preflight(origin, headers.get("access-control-request-headers", ""), send)
                return
            self._check_key(scope, headers)
        except RefusalError as refusal:
            await refused(refusal, self._error_body(scope["path"]))(scope, receive, _with_headers(send, [NO_SNIFFING]))
            return
        allowing = _allowing(origin) if is_foreign else ()
        await self._app(scope, receive, _with_headers(send, [NO_SNIFFING, *allowing]))

    def _check_size(self, scope: Scope, headers: Headers) -> None:
        num_bytes = sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
        if num_bytes > self._settings.max_header_bytes:
            raise RefusalError(HEADER_FIELDS_TOO_LARGE, "the headers are too large.", code="headers_too_large")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            what = f"the body has {length} bytes, and {self._settings.max_body_bytes} are read."
            raise RefusalError(TOO_LARGE, what, code="body_too_large")

    def _check_host(self, headers: Headers) -> None:
        """Refuse a name that is not this machine's; with a key any name will do, since pages do not know it."""
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        except ValueError:  # half an address of IPv6
            name = headers.get("host", "")
        if self._settings.api_key is None and name not in {*LOOPBACK, self._settings.host}:
            raise RefusalError(FORBIDDEN, f"'{name[:80]}' is no name of this server.", code="foreign_host")

    def _is_own(self, origin: str, headers: Headers) -> bool:
        return origin == f"http://{headers.get('host', '')}"

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None or scope["path"] in OPEN_PATHS:
            return
        sent = (
            headers.get("x-api-key")
            or headers.get("api-key")
            or headers.get("authorization", "").removeprefix("Bearer ")
        )
        if not hmac.compare_digest(sent.encode(), key.encode()):
            raise RefusalError(UNAUTHORIZED, "the API key is missing or wrong.", code="invalid_api_key")


def _allowing(origin: str) -> Sequence[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]


async def _preflight(origin: str, names: str, send: Send) -> None:
    """Answer a browser's question whether a page may ask, with headers of these names: clients send many of their own.

    The browser itself keeps a page from setting those that say who asks.
    """
    headers = [
        *_allowing(origin),
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", names.encode("latin-1")),
        (b"access-control-allow-private-network", b"true"),  # from a page of the web to this machine
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _with_headers(send: Send, headers: Sequence[tuple[bytes, bytes]]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return sending
