"""What is not answered: with which status, and what is named."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edgespec.errors import EdgespecError
from edgespec.serve import connection
from edgespec.serve.settings import ServerSettings
from tests.edgespec.serve.conftest import KEY, Started

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "change", "field", "words"),
    [
        (CHAT, {"tool_resources": {"a": 1}}, "tool_resources", "not known"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": "hello"}, "messages", "list"),
        (CHAT, {"temperature": -1}, None, "temperature"),
        (CHAT, {"temperature": True}, "temperature", "number"),
        (CHAT, {"n": 0}, "n", "greater"),
        (CHAT, {"max_tokens": True}, "max_tokens", "number"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs"),
        (CHAT, {"stream_options": {"foo": 1}}, "stream_options.foo", "not known"),
        (CHAT, {"logit_bias": {"99999999": 1}}, None, "99999999"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "image_url"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, None, "context holds"),
        ("/v1/completions", {"prompt": ""}, "prompt", "empty"),
        ("/v1/completions", {"prompt": [0, 10**9]}, None, "1000000000"),
        ("/v1/completions", {}, "prompt", "missing"),
        ("/v1/completions", {"prompt": "a", "seed": False}, "seed", "number"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305"}, {"name": "web"}]}, "", "tools.1.input_schema"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "", "picture 1"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    client: httpx.Client, path: str, change: dict[str, Any], field: str | None, words: str
) -> None:
    body = {**ASKED, **change}
    if path == "/v1/completions":
        del body["messages"]
    found = client.post(path, json=body)
    assert found.status_code == 400
    error = found.json()["error"]
    assert words in error["message"]
    if path == "/v1/messages":
        assert (found.json()["type"], error["type"]) == ("error", "invalid_request_error")
    else:
        assert error["param"] == field


def test_a_body_that_does_not_come_is_given_up(start: Started) -> None:
    _, address = start(body_s=0.2)
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 10\r\n\r\n{{".encode())
        assert b" 408 " in client.recv(1000)


def test_headers_that_do_not_come_are_given_up_however_many_bytes_of_them_do(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "IDLE_S", 0.4)
    _, address = start(header_s=0.3)
    host, port = address.removeprefix("http://").split(":")
    whole = f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    slow = f"GET /health HTTP/1.1\r\nHost: {host}\r\n".encode()
    for begun in (b"", slow, whole + slow):  # a second request on a connection as well
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(begun)
            started, received = time.monotonic(), b""
            client.settimeout(0.05)
            while time.monotonic() - started < 3:
                with contextlib.suppress(TimeoutError):
                    if not (part := client.recv(1000)):
                        break
                    received += part
                with contextlib.suppress(OSError):
                    client.sendall(b"X-A: b\r\n" if begun else b"")
            assert 0.2 < time.monotonic() - started < 2
            assert received.count(b"200 OK") == begun.count(b"\r\n\r\n")


def test_a_body_may_take_longer_than_headers(start: Started) -> None:
    _, address = start(header_s=0.2)

    def slowly() -> Iterator[bytes]:
        for part in (b'{"prompt": "a", ', b'"max_tokens": 2}'):
            time.sleep(0.25)
            yield part

    assert httpx.post(f"{address}/v1/completions", content=slowly()).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "rebound.example"}, 403),
        ({"host": "127.0.0.1.rebound.example"}, 403),
        ({"origin": "https://foreign.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "localhost"}, 200),
        ({"x-long": "x" * 40_000}, 431),
    ],
)
def test_other_names_and_pages_are_refused(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    assert client.get("/v1/models", headers=headers).status_code == status


def test_no_answer_is_taken_for_a_page(client: httpx.Client) -> None:
    asked = [client.get(path) for path in ("/", "/v1/models")]
    for found in (*asked, client.post(CHAT, json={}), client.get("/", headers={"origin": "null"})):
        assert found.headers.get_list("x-content-type-options") == ["nosniff"]


def test_a_page_that_is_let_in_may_ask_and_no_other(start: Started) -> None:
    _, address = start(allowed_origins=("https://own.example",))
    asked = httpx.options(address + CHAT, headers={"origin": "https://own.example"})
    found = httpx.get(address + "/v1/models", headers={"origin": "https://own.example"})
    other = httpx.get(address + "/v1/models", headers={"origin": "https://other.example"})
    assert [asked.status_code, found.status_code, other.status_code] == [204, 200, 403]
    assert found.headers["access-control-allow-origin"] == "https://own.example"


def test_health_needs_no_key_and_models_do(start: Started) -> None:
    _, address = start(api_key=KEY)
    assert [httpx.get(address + path).status_code for path in ("/health", "/v1/models")] == [200, 401]


def test_other_machines_are_let_in_with_a_key_alone() -> None:
    with pytest.raises(EdgespecError, match="no key"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", api_key=KEY).host == "0.0.0.0"


def test_each_text_of_a_request_takes_a_place(start: Started) -> None:
    _, address = start(max_waiting=0)
    assert httpx.post(address + CHAT, json={**ASKED, "n": 3}).status_code == 429
    assert httpx.post(address + CHAT, json={**ASKED, "n": 2}, timeout=60).status_code == 200


def test_a_server_that_stops_ends_texts_with_their_end(start: Started) -> None:
    queue, address = start()
    lines = []
    with httpx.stream("POST", address + CHAT, json={**ASKED, "max_tokens": 900, "ignore_eos": True, "stream": True},
                      timeout=60) as found:  # fmt: skip
        for line in found.iter_lines():
            lines.append(line)
            if len(lines) == 8:
                queue.stop()
    objects = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert objects[-1]["choices"][0]["finish_reason"] == "length"
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert httpx.post(address + CHAT, json=ASKED).status_code == 503


def test_what_is_not_here_is_named(client: httpx.Client) -> None:
    assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/v1/models/demo").json()["id"] == "demo"
    assert client.get("/../../etc/passwd").status_code == 404


def test_tokens_there_and_back(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": "def main("}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": "def main("}
    for unknown in (-1, 1 << 40):
        answer = client.post("/detokenize", json={"tokens": [*tokens, unknown]})
        assert (answer.status_code, str(unknown) in answer.text) == (400, True)
    assert client.get("/props").json()["texts"] == {"open": 0, "at_once": 2, "may_wait": 64}
