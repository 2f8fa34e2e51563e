"""A connection that is closed where its next request does not come in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S = 75.0  # after an answer, in which the next request has to be here


class TimedConnection(H11Protocol):
    """An HTTP/1.1 connection; uvicorn's own waits for headers as long as bytes of them come."""

    def __init__(self, *arguments: Any, header_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_s = header_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait(self._header_s)

    def handle_events(self) -> None:
        """Read what has come; the headers of a request end the waiting, and its body has a time of its own."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request, however slowly the rest of a refused body comes."""
        self._wait(IDLE_S)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._end_waiting()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        self._end_waiting()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _end_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
