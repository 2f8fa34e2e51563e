"""Rows of a batch that echo their prompts have the bodies that the server answers them with."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edgespec import Engine
from tests.cli.conftest import RunCli, jsonl, records
from tests.edgespec.serve.conftest import close_server, open_server

TEXT = "def area(w, h):\n    return w"
OPTIONS = ["p.jsonl", "-md", "none", "--policy", "none", "--temp", "0", "--ordered"]
ECHOED: list[dict[str, Any]] = [
    {"echo": True, "logprobs": 2, "max_tokens": 0},
    {"echo": True, "logprobs": 1, "max_tokens": 3},
    {"echo": True, "max_tokens": 2},
    {"echo": True, "max_tokens": 0},
    {"logprobs": 0, "max_tokens": 2},
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with Engine.from_pretrained(parallel=2, context_tokens=1024) as engine:
        _, server, thread = open_server(engine)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
            yield client
        close_server(server, thread)


def completions(*bodies: dict[str, Any]) -> dict[str, str]:
    rows = [{"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            for number, body in enumerate(bodies)]  # fmt: skip
    return jsonl(rows)


def bodies(run_cli: RunCli, options: list[str], files: dict[str, str]) -> list[dict[str, Any]]:
    outcome = run_cli([*OPTIONS, *options, "--format", "openai-batch"], files=files).ended()
    return [json.loads(line)["response"]["body"] for line in outcome.out.splitlines()]


def without_bits(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice whose numbers are rounded: others share its passes."""
    return json.loads(json.dumps(choice), parse_float=lambda text: round(float(text), 3))


def test_a_completion_is_echoed_as_the_server_does(run_cli: RunCli, client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"content": TEXT}).json()["tokens"]
    asked = [{"prompt": prompt, "temperature": 0, **more} for more in ECHOED for prompt in (TEXT, ids)]
    for body, found in zip(asked, bodies(run_cli, [], completions(*asked)), strict=True):
        expected = client.post("/v1/completions", json=body).json()
        assert [without_bits(one) for one in found["choices"]] == [without_bits(one) for one in expected["choices"]]
        assert found["choices"][0]["text"].startswith(TEXT) == ("echo" in body)
        assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == body["max_tokens"]


def test_a_run_that_scores_prompts_puts_their_numbers_into_the_bodies(run_cli: RunCli, client: httpx.Client) -> None:
    (found,) = bodies(
        run_cli, ["--echo-logprobs", "--logprobs", "2", "-n", "2"], completions({"prompt": TEXT, "max_tokens": 2})
    )
    body = {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    assert without_bits(found["choices"][0]) == without_bits(
        client.post("/v1/completions", json=body).json()["choices"][0]
    )
    (echoed,) = bodies(
        run_cli, ["--echo-logprobs", "-n", "0"], completions({"prompt": TEXT, "echo": True, "max_tokens": 0})
    )
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][1] < 0
    chat = jsonl(
        [{"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": TEXT}]}}]
    )
    template = {"t.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (found,) = bodies(run_cli, ["--echo-logprobs", "-n", "2", "--chat-template", "t.jinja"], {**chat, **template})
    first, *scored = found["prompt_logprobs"]
    assert first["logprob"] is None
    assert scored[0]["logprob"] < 0


def test_a_row_that_echoes_is_another_than_one_that_does_not(run_cli: RunCli) -> None:
    """Else --resume would take the one for the other."""
    out = [*OPTIONS, "--format", "openai-batch", "-o", "out"]
    run_cli(out, files=completions({"prompt": TEXT, "max_tokens": 2}))
    again = run_cli([*out, "--resume"], files=completions({"prompt": TEXT, "max_tokens": 2, "echo": True}))
    assert (again.code, "prompts have changed" in again.err) == (2, True), again.err


def test_a_row_may_ask_itself_and_nothing_else_has_no_length(run_cli: RunCli) -> None:
    rows = jsonl([{"prompt": TEXT, "prompt_logprobs": 0, "max_tokens": 0}])
    (record,) = records(run_cli(OPTIONS, files=rows))
    assert (record["prompt_logprobs"][0]["logprob"], record["prompt_logprobs"][1]["logprob"] < 0) == (None, True)
    refused = run_cli(["-p", TEXT, "-n", "0"])
    assert (refused.code, "not a length" in refused.err) == (2, True)
