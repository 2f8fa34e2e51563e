"""A server over the built-in pair, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from edgespec import Engine
from edgespec.serve.desk import Desk
from edgespec.serve.listen import listen
from edgespec.serve.run import Server
from edgespec.serve.settings import ServerSettings

KEY = "a key of some length"
Started = Callable[..., tuple[Desk, str]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(parallel=2, context_tokens=1024) as engine:
        yield engine


@pytest.fixture
def running() -> list[tuple[Server, threading.Thread]]:
    """The servers that `start` has started."""
    return []


@pytest.fixture
def start(engine: Engine, running: list[tuple[Server, threading.Thread]]) -> Iterator[Started]:
    """Start servers; returns each one's desk and address."""

    def started(**options: Any) -> tuple[Desk, str]:
        desk, server, thread = open_server(engine, **options)
        running.append((server, thread))
        return desk, f"http://127.0.0.1:{server.port}"

    yield started
    for server, thread in running:
        close_server(server, thread)


def open_server(engine: Engine, **options: Any) -> tuple[Desk, Server, threading.Thread]:
    """A server that answers, and the thread that it runs in."""
    settings = ServerSettings(**{"port": 0, "heartbeat_s": 0.05, "alias": "demo", **options})
    desk = Desk(engine, max_waiting=settings.max_waiting, heartbeat_s=settings.heartbeat_s)
    server, is_ready = Server(desk, settings, listen(settings), on_request=lambda _line: None), threading.Event()
    thread = threading.Thread(target=server.run, args=(is_ready.set,))
    thread.start()
    assert is_ready.wait(10)
    return desk, server, thread


def close_server(server: Server, thread: threading.Thread) -> None:
    server.stop(at_once=True)
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def client(start: Started) -> Iterator[httpx.Client]:
    _, address = start()
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client
