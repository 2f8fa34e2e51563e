"""A connection that is closed where its next request does not come in time, or its answer is not read."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S = 75.0  # after an answer, in which the next request has to be here
GRACE_S = 0.05  # in which a request that comes with its connection is read, however many come at once
UNREAD_S = 120.0  # in which a client has to read something of what it asked for


class TimedConnection(H11Protocol):
    """An HTTP/1.1 connection; uvicorn's own waits for headers as long as bytes of them come, and for readers for ever.

    Where there are more connections than may be, the one that has waited longest for a whole request makes room.
    """

    def __init__(
        self, *arguments: Any, header_s: float, most: int, waiting: dict[TimedConnection, None], **options: Any
    ) -> None:
        """Be one of at most so many, of which some are `waiting`, the longest first."""
        super().__init__(*arguments, **options)
        self._header_s, self._most, self._waiting = header_s, most, waiting
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_bytes = 0  # when the limit was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait(self._header_s)
        if len(self.connections) > self._most:
            self.loop.call_later(GRACE_S, self._make_room)

    def handle_events(self) -> None:
        """Read what has come; headers end the first limit, and a body, which has one of its own, the waiting."""
        super().handle_events()
        if self._is_answering():
            self._limit(None)
            if not self.cycle.more_body:
                self._waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for the next request, however slowly the rest of a refused body comes."""
        self._wait(IDLE_S)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Give up a client that reads nothing of a long answer."""
        super().pause_writing()
        if self._is_answering():
            self._limit(UNREAD_S)

    def resume_writing(self) -> None:
        """Go on: something was read."""
        super().resume_writing()
        if self._is_answering():
            self._limit(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._waiting.pop(self, None)
        self._limit(None)
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        self._limit(seconds)
        self._waiting[self] = None

    def _limit(self, seconds: float | None) -> None:
        """Leave after so many seconds, but for a client that still reads; none takes the limit away."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._unread_bytes = None, self.transport.get_write_buffer_size()
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._look, seconds)

    def _look(self, seconds: float) -> None:
        if 0 < self.transport.get_write_buffer_size() < self._unread_bytes:
            self._limit(seconds)
        else:
            self._leave()

    def _make_room(self) -> None:
        if len(self.connections) > self._most and self._waiting:
            next(iter(self._waiting))._leave()

    def _leave(self) -> None:
        """Close the connection without what was not read of an answer, which would keep it open."""
        self._waiting.pop(self, None)
        self.transport.abort()
