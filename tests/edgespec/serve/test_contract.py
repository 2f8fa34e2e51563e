"""Every endpoint keeps the contract: who may ask, what a body must be, and that who leaves frees a place."""

import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from edgespec import Engine
from edgespec.serve.app import make_app
from edgespec.serve.request_queue import RequestQueue
from edgespec.serve.settings import ServerSettings
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from tests.edgespec.serve.conftest import KEY, Started

MESSAGES = [{"role": "user", "content": "a"}]
# A body that is answered, and a field of it with a value that it cannot have
ENDPOINTS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 2}, "max_tokens", "many"),
    "/v1/completions": ({"prompt": "a", "max_tokens": 2}, "max_tokens", "many"),
    "/v1/responses": ({"input": "a", "max_output_tokens": 2}, "max_output_tokens", "many"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 2}, "max_tokens", "many"),
    "/v1/messages/count_tokens": ({"messages": MESSAGES}, "messages", 3),
    "/tokenize": ({"content": "a"}, "content", 3),
    "/detokenize": ({"tokens": [1]}, "tokens", "one"),
}
# What an endpoint says to the body above, where it is always the same
ANSWERS: dict[str, dict[str, Any]] = {"/tokenize": {"tokens": [65]}, "/detokenize": {"content": "!"}}
WRITING = {path: bound for path, (_, bound, _) in ENDPOINTS.items() if bound.startswith("max_")}
every_endpoint = pytest.mark.parametrize("path", ENDPOINTS)


def refusal(found: httpx.Response, status: int) -> tuple[str, str | None]:
    """What a refusal says, and the field that it names, where the protocol has a place for it."""
    assert found.status_code == status, found.text
    error = found.json()["error"]
    if "/v1/messages" in str(found.url):
        assert (found.json()["type"], "param" in error) == ("error", False)
        return error["message"], None
    return error["message"], error["param"]


def test_every_endpoint_that_takes_a_body_is_asked(engine: Engine) -> None:
    routes = make_app(RequestQueue(engine, max_waiting=0, heartbeat_s=1), ServerSettings()).routes
    taking = {route.path for route in routes if isinstance(route, Route) and "POST" in (route.methods or ())}
    assert taking == ENDPOINTS.keys()


@every_endpoint
def test_a_body_is_answered_and_a_wrong_or_unknown_field_is_named(client: httpx.Client, path: str) -> None:
    body, field, wrong = ENDPOINTS[path]
    found = client.post(path, json=body)
    assert found.status_code == 200
    assert found.json() == ANSWERS.get(path, found.json())
    for change in ({field: wrong}, {"with_pieces": True}):
        (name,) = change
        what, named = refusal(client.post(path, json={**body, **change}), 400)
        assert name in (named or what)
    assert client.get(path).status_code == 405


@every_endpoint
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[" * 100_000]
)
def test_a_body_that_is_no_object_is_refused(client: httpx.Client, path: str, content: bytes) -> None:
    refusal(client.post(path, content=content), 400)


@every_endpoint
def test_too_large_a_body_is_refused_with_and_without_its_length(start: Started, path: str) -> None:
    _, address = start(max_body_bytes=1000)
    refusal(httpx.post(address + path, content=b"x" * 1001), 413)
    refusal(httpx.post(address + path, content=(b"x" * 300 for _ in range(4))), 413)


@every_endpoint
def test_a_key_is_needed_where_there_is_one_and_a_name_of_this_server(
    start: Started, shared_address: str, path: str
) -> None:
    _, address = start(api_key=KEY)
    body, right = ENDPOINTS[path][0], {"authorization": f"Bearer {KEY}"}
    for headers in ({}, {"authorization": f"Bearer {KEY[:-1]}"}, {"x-api-key": f"{KEY}!"}):
        refusal(httpx.post(address + path, json=body, headers=headers), 401)
    for headers in (right, {"x-api-key": KEY}):
        assert httpx.post(address + path, json=body, headers=headers).status_code == 200
    for headers in ({"host": "rebound.example"}, {"origin": "https://foreign.example"}):
        refusal(httpx.post(shared_address + path, json=body, headers=headers), 403)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", WRITING)
def test_a_client_that_leaves_ends_its_text(
    start: Started, engine: Engine, path: str, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, address = start()
    handles, submit = list[TextHandle](), engine.submit

    def submitted(request: TextRequest, **options: Any) -> TextHandle:
        """Of a protocol that cannot ask for it, too, no text ends by itself."""
        endless = replace(request, sampling=replace(request.sampling, ignore_eos=True))
        handles.append(submit(endless, **options))
        return handles[-1]

    def slowly(self: TextHandle, step: Any) -> None:  # so that no text is at its length before its client has left
        time.sleep(0.004)
        take(self, step)

    take = TextHandle.take
    monkeypatch.setattr(TextHandle, "take", slowly)
    monkeypatch.setattr(engine, "submit", submitted)
    body = {**ENDPOINTS[path][0], WRITING[path]: 900, "stream": is_stream}
    if is_stream:
        with httpx.stream("POST", address + path, json=body, timeout=60) as found:
            next(line for line in found.iter_lines() if line.startswith("data: ") and handles)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(address + path, json=body, timeout=0.3)
    ends_at = time.monotonic() + 10
    while queue.num_open and time.monotonic() < ends_at:
        time.sleep(0.02)
    assert queue.num_open == 0
    assert [handle.is_cancelled for handle in handles] == [True]


@pytest.mark.parametrize("path", WRITING)
def test_texts_beyond_the_queue_are_refused_and_told_when_to_come_back(start: Started, path: str) -> None:
    queue, address = start()
    queue.max_open = 0
    found = httpx.post(address + path, json=ENDPOINTS[path][0])
    refusal(found, 429)
    assert int(found.headers["retry-after"]) > 0
