"""A server over the built-in pair, in this process."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from edgespec import Engine
from edgespec.chat import answer
from edgespec.serve.listen import listen
from edgespec.serve.request_queue import RequestQueue
from edgespec.serve.run import Server
from edgespec.serve.settings import ServerSettings

KEY = "a key of some length"
Started = Callable[..., tuple[RequestQueue, str]]


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The built-in pair, with the chat template TEMPLATE of a module that has one."""
    template = getattr(request.module, "TEMPLATE", None)
    with Engine.from_pretrained(parallel=2, context_tokens=1024, chat_template=template) as engine:
        yield engine


@pytest.fixture
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pair write its answers in the FORM of a module."""
    monkeypatch.setattr(answer, "_known_formats", lambda: [request.module.FORM])


@pytest.fixture
def running() -> list[tuple[Server, threading.Thread]]:
    """The servers that `start` has started."""
    return []


@pytest.fixture
def start(engine: Engine, running: list[tuple[Server, threading.Thread]]) -> Iterator[Started]:
    """Start servers; returns each one's queue and address."""

    def started(**options: Any) -> tuple[RequestQueue, str]:
        queue, server, thread = open_server(engine, **options)
        running.append((server, thread))
        return queue, f"http://127.0.0.1:{server.port}"

    yield started
    for server, thread in running:
        close_server(server, thread)


def open_server(engine: Engine, **options: Any) -> tuple[RequestQueue, Server, threading.Thread]:
    """A server that answers, and the thread that it runs in."""
    temperature = options.pop("temperature", None)
    settings = ServerSettings(**{"port": 0, "heartbeat_s": 0.05, "alias": "demo", **options})
    names = ("max_waiting", "heartbeat_s", "cache_prompt")
    bounds = {name: getattr(settings, name) for name in names}
    queue = RequestQueue(engine, **bounds, temperature=temperature)
    server, is_ready = Server(queue, settings, listen(settings), on_request=lambda _line: None), threading.Event()
    thread = threading.Thread(target=server.run, args=(is_ready.set,))
    thread.start()
    assert is_ready.wait(10)
    return queue, server, thread


def close_server(server: Server, thread: threading.Thread) -> None:
    server.stop(at_once=True)
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def shared_address(engine: Engine) -> Iterator[str]:
    """A server for all tests of a module that ask for nothing of their own: to start and end one takes longer."""
    _, server, thread = open_server(engine)
    yield f"http://127.0.0.1:{server.port}"
    close_server(server, thread)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of the module's server, or of one of its own where answers are read by a FORM."""
    has_own = {"form", "start", "running"} & {*request.fixturenames}
    address = request.getfixturevalue("start")()[1] if has_own else request.getfixturevalue("shared_address")
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture
def address(client: httpx.Client) -> str:
    """Where that server is."""
    return str(client.base_url).rstrip("/")


@pytest.fixture
def openai(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as openai:
        yield openai


@pytest.fixture
def anthropic(address: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=address, api_key="any", max_retries=0) as anthropic:
        yield anthropic


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed answer, which are named after their types."""
    assert response.status_code == 200, response.read()
    found, names = [], []
    for line in response.iter_lines():
        if line.startswith("event: "):
            names.append(line.removeprefix("event: "))
        elif line.startswith("data: "):
            found.append(json.loads(line.removeprefix("data: ")))
    assert names == [event["type"] for event in found]
    return found
