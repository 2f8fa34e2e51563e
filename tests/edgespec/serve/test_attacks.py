"""Requests that would cost the server much: each is refused before it does, and others are served."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from edgespec import Engine
from edgespec.sampling import matcher
from edgespec.serve import connection
from edgespec.serve.app import most_bytes
from edgespec.serve.body import Fields, fields_of
from edgespec.serve.openai_chat import ChatBody
from edgespec.serve.openai_completions import CompletionBody
from edgespec.serve.openai_schema import MAX_BIASES, MAX_STOPS
from edgespec.serve.refusal import RefusalError
from edgespec.serve.request_queue import MAX_GRAMMAR_CHARACTERS, RequestQueue
from edgespec.serve.run import SPARE_CONNECTIONS
from tests.edgespec.serve.conftest import Started

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
MANY = 20_000
NUM_BYTES = 16 << 20


def connected(address: str, *, rcvbuf: int | None = None) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    client = socket.socket()
    if rcvbuf is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    client.settimeout(5)
    client.connect((host, int(port)))
    return client


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ChatBody, {"messages": [1] * MANY}, "messages.0"),
        (ChatBody, {"messages": [{}], "tools": [1] * MANY}, "tools.0"),
        (CompletionBody, {"prompt": [{}] * MANY}, "prompt"),
        (CompletionBody, {"prompt": "a", "stop": [1] * MANY}, "stop"),
        (CompletionBody, {"prompt": "a", "stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(n): [] for n in range(MAX_BIASES + 1)}}, "logit_bias"),
    ],
)
def test_many_wrong_values_make_few_problems(kind: type[Fields], body: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusalError) as found:
        fields_of(kind, body)
    assert found.value.field == field
    assert isinstance(found.value.__cause__, ValidationError)
    assert found.value.__cause__.error_count() <= 6  # one of each kind of list that it might be


def test_many_unknown_fields_and_keys_that_come_twice_are_found_at_once(client: httpx.Client) -> None:
    keys = json.dumps({str(number): 1 for number in range(60_000)})
    began = time.monotonic()
    unknown = client.post(PLAIN, content=keys)
    twice = client.post(PLAIN, content=f'{keys[:-1]}, "59999": 1}}')
    assert [found.json()["error"]["code"] for found in (unknown, twice)] == ["unknown_field", "invalid_json"]
    assert time.monotonic() - began < 5  # half a minute, were each compared with each


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 1100}, "1100 tokens or messages"),
        (PLAIN, {"prompt": [5] * 1100}, "1100 tokens or messages"),
        (PLAIN, {**GOOD, "grammar": "x" * (MAX_GRAMMAR_CHARACTERS + 1)}, "'grammar' has"),
        (PLAIN, {**GOOD, "json_schema": {"enum": ["x" * MAX_GRAMMAR_CHARACTERS]}}, "'json_schema' has"),
        ("/tokenize", {"content": "a b " * 50_000}, "more than 2048 tokens"),
        ("/detokenize", {"tokens": [5] * 1100}, "'tokens' has 1100 tokens"),
    ],
)
def test_what_no_context_holds_is_refused_by_its_number(
    client: httpx.Client, path: str, change: dict[str, Any], words: str
) -> None:
    found = client.post(path, json=change)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]


def test_a_body_beyond_all_contexts_is_not_read(client: httpx.Client, engine: Engine) -> None:
    most = most_bytes(engine.max_context)
    refused = client.post(PLAIN, content=b" " * (most + 1))
    read = client.post(PLAIN, content=b" " * most)
    assert [found.json()["error"]["code"] for found in (refused, read)] == ["body_too_large", "invalid_json"]


def test_silent_connections_make_room_for_those_that_ask(start: Started) -> None:
    queue, address = start(max_waiting=0)
    most = queue.max_open + SPARE_CONNECTIONS
    with ExitStack() as opened:
        # Half of them begin a body, and the last one speaks later
        silent = [opened.enter_context(connected(address)) for _ in range(2 * most)]
        for one in silent[::2]:
            one.sendall(f"POST {PLAIN} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode())
        for _ in range(3):
            assert httpx.post(address + PLAIN, json=GOOD, timeout=60).status_code == 200
        assert all(is_closed(one) for one in silent[: most - 2])
        silent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in silent[-1].recv(100)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/detokenize", {"tokens": [5]}), (PLAIN, {"prompt": [5], "max_tokens": 1, "echo": True, "n": 2, "stream": True})],
)
def test_a_client_that_reads_nothing_of_a_long_answer_is_left(
    start: Started, monkeypatch: pytest.MonkeyPatch, engine: Engine, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(connection, "UNREAD_S", 0.3)
    monkeypatch.setattr(connection, "IDLE_S", 0.3)
    monkeypatch.setattr(type(engine.pair.tokenizer), "decode", lambda *_: "x" * NUM_BYTES)
    _, address = start()
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()

    def received(pause_s: float) -> int:
        found = 0
        with connected(address, rcvbuf=4096) as client:
            client.sendall(head + content)
            time.sleep(pause_s)
            with contextlib.suppress(ConnectionError):
                while found < NUM_BYTES and (part := client.recv(1 << 16)):
                    found += len(part)
                    time.sleep(len(part) / NUM_BYTES)
        return found

    assert received(0.05) >= NUM_BYTES  # slowly, in a second and more
    assert received(0.9) < NUM_BYTES


def test_prompts_that_are_encoded_count_among_the_texts(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, address = start(max_waiting=0)
    goes_on, made = threading.Event(), queue._made

    def slowly(job: Any) -> Any:
        goes_on.wait(20)
        return made(job)

    monkeypatch.setattr(queue, "_made", slowly)

    async def ask() -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = [asyncio.create_task(client.post(address + PLAIN, json=GOOD)) for _ in range(5)]
            while sum(task.done() for task in tasks) < 3:
                await asyncio.sleep(0.01)
            goes_on.set()
            return sorted(answer.status_code for answer in await asyncio.gather(*tasks))

    assert asyncio.run(ask()) == [200, 200, 429, 429, 429]


def test_a_grammar_that_takes_long_is_refused_and_others_are_served_meanwhile(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = start()
    goes_on, begin = threading.Event(), matcher._start

    def slowly(grammar: Any, *others: Any) -> Any:
        return goes_on.wait(20) if "slow" in grammar.text else begin(grammar, *others)

    monkeypatch.setattr(matcher, "_start", slowly)
    monkeypatch.setattr(matcher, "MAX_COMPILE_S", 2.0)

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(timeout=60) as client:
            slow = asyncio.create_task(client.post(address + PLAIN, json={**GOOD, "json_schema": {"title": "slow"}}))
            await asyncio.sleep(0.3)
            answer = await client.post(address + PLAIN, json=GOOD)
            assert not slow.done()
            return [answer, await slow]

    answer, refusal = asyncio.run(ask())
    goes_on.set()
    assert (answer.status_code, refusal.status_code) == (200, 400)
    assert "takes longer than 2 s" in refusal.json()["error"]["message"]


def test_work_of_the_encoder_is_bounded(engine: Engine) -> None:
    queue, goes_on = RequestQueue(engine, max_waiting=0, heartbeat_s=1), threading.Event()

    async def ask() -> list[object]:
        tasks = [asyncio.create_task(queue.encoding(goes_on.wait, 20)) for _ in range(queue.max_open + 3)]
        await asyncio.sleep(0)
        goes_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(ask())
    assert [getattr(one, "status", one) for one in found] == [True, True, True, 429, 429]
    queue.close()


def test_headers_are_counted_with_what_stands_around_them(client: httpx.Client) -> None:
    few, many = ([("x", "")] * number for number in (1000, 10_000))
    assert client.get("/v1/models", headers=few).status_code == 200
    assert client.get("/v1/models", headers=many).status_code == 431


def test_a_page_that_is_let_in_may_send_what_its_client_sends(start: Started) -> None:
    _, address = start(allowed_origins=("https://own.example",))
    asked = {"origin": "https://own.example", "access-control-request-headers": "authorization,x-stainless-os"}
    found = httpx.options(address + CHAT, headers=asked)
    assert found.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    foreign = httpx.options(address + CHAT, headers={**asked, "origin": "https://other.example"})
    assert (foreign.status_code, "access-control-allow-headers" in foreign.headers) == (403, False)


def test_no_other_protocol_goes_past_the_limits(client: httpx.Client) -> None:
    asked = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x" * 24}
    assert client.get("/v1/models", headers={**asked, "sec-websocket-version": "13"}).status_code == 200
    assert client.get("/v1/models", headers={**asked, "host": "rebound.example"}).status_code == 403
