"""Running the server until it is told to end."""

import asyncio
import functools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from edgespec.serve.app import OnRequest, make_app
from edgespec.serve.connection import IDLE_S, TimedConnection
from edgespec.serve.request_queue import RequestQueue
from edgespec.serve.settings import ServerSettings

BACKLOG = 256  # connections that come while the others are looked at
ENDING_S = 60  # in which texts under way may end their pass
SPARE_CONNECTIONS = 64  # beside those of all texts that may be open: few, because the system's files are


class Server:
    """A server over a queue of texts; `stop` may be called by any thread, or a signal's handler."""

    def __init__(
        self, queue: RequestQueue, settings: ServerSettings, listening: socket.socket, *, on_request: OnRequest
    ) -> None:
        """Answer at a socket that listens already: clients that come before wait."""
        self._queue, self._sockets = queue, [listening]
        app = make_app(queue, settings, on_request=on_request)
        most = queue.max_open + SPARE_CONNECTIONS
        connection: Any = functools.partial(TimedConnection, header_s=settings.header_s, most=most, waiting={})
        config = uvicorn.Config(
            app, http=connection, ws="none", log_level="critical", access_log=False, server_header=False,
            proxy_headers=False, timeout_keep_alive=int(IDLE_S), timeout_graceful_shutdown=ENDING_S,
            backlog=BACKLOG,
        )  # fmt: skip
        self._server = _WithoutSignals(config)

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._sockets[0].getsockname()[1])

    def run(self, on_ready: Callable[[], None]) -> None:
        """Answer requests until `stop`."""

        async def serve() -> None:
            on_ready()
            await self._server.serve(self._sockets)

        asyncio.run(serve())

    def stop(self, *, at_once: bool = False) -> None:
        """Take no more requests, and end the texts under way after their pass, or between two layers."""
        self._queue.stop(at_once=at_once)
        self._server.should_exit = True
        self._server.force_exit = at_once


class _WithoutSignals(uvicorn.Server):
    """A server that leaves signals to who runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
