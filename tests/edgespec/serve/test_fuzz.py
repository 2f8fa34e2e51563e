"""Odd bodies and headers: each is refused in its protocol's form with a name, or answered, and nothing breaks."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from edgespec import Engine
from tests.fuzz.odd_requests import BODIES, GOOD, Asked, problem, requests
from tests.support.running_server import TEMPLATE

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(parallel=2, context_tokens=256, chat_template=TEMPLATE) as engine:
        yield engine


def test_odd_requests_are_refused_by_name_or_answered(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    for path, body in BODIES.items():  # which are all right as they stand
        assert client.post(path.partition("#")[0], json=body).status_code == 200

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(asked=requests())
    def ask(asked: Asked) -> None:
        answer = client.post(asked.path, content=asked.content, headers=asked.headers)
        assert problem(asked, answer) is None, answer.text

    ask()
    assert not [record for record in caplog.records if record.exc_info]
    assert client.post("/v1/completions", json=GOOD).status_code == 200
    assert client.get("/props").json()["texts"]["open"] == 0


@pytest.mark.parametrize(
    ("path", "change", "name"),
    [
        (MESSAGES, {"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
        (RESPONSES, {"input": [{"type": {}}]}, "input.0"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "input.0.content.0"),
        (RESPONSES, {"instructions": "s", "input": [{"role": ["system"], "content": "x"}]}, "input.0.role"),
        ("/v1/completions", {"\ud800": 1}, "\\ud800"),
        ("/v1/chat/completions", {"messages": [{"role": "\ud800", "content": 3}]}, "(role '\\ud800')"),
        ("/v1/completions", {"json_schema": {"type": "\ud800"}}, "schema"),
        ("/v1/completions", {"json_schema": {"required": "é" * 80}}, "schema"),
    ],
)
def test_values_that_no_set_holds_and_no_text_holds_are_named(
    client: httpx.Client, path: str, change: dict[str, Any], name: str
) -> None:
    answer = client.post(path, content=json.dumps({**BODIES[path], **change}))
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["[", "[::1", "a]:80"])
def test_half_an_address_is_no_name_of_the_server(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/models", headers={"host": host}).json()["error"]["code"] == "foreign_host"
