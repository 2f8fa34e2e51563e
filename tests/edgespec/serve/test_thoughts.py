"""An answer of a form comes behind a thought, which has the tokens that it may have: in every protocol."""

import json
import re
from typing import Any

import httpx
import pytest

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant><think>{{ '\\n' }}"
    "{# '\\n</think>\\n\\n' #}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
ASKED = [{"role": "user", "content": "def main("}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
LENGTH = 160


def chat(client: httpx.Client, **fields: Any) -> Any:
    body = {"messages": ASKED, "max_tokens": LENGTH, "temperature": 0, "response_format": FORMAT} | fields
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    "wish",
    [
        {"reasoning_budget": 9}, {"thinking_token_budget": 9}, {"thinking_budget_tokens": 9},
        {"reasoning": {"max_tokens": 9}}, {"thinking": {"type": "enabled", "budget_tokens": 9}},
    ],
    ids=str,
)  # fmt: skip
def test_a_chat_thinks_and_then_says_what_fits(client: httpx.Client, wish: dict[str, Any]) -> None:
    message = chat(client, **wish).json()["choices"][0]["message"]
    assert json.loads(message["content"])["a"] in ("x", "y")
    free = chat(client, max_tokens=9).json()["choices"][0]["message"]
    assert message["reasoning_content"].strip() == free["reasoning_content"].strip()
    assert free["content"] in (None, ""), "a thought that a bound cut is no answer"


def test_a_stream_tells_the_thought_first(client: httpx.Client) -> None:
    body = {"messages": ASKED, "max_tokens": LENGTH, "temperature": 0, "response_format": FORMAT, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json={**body, "reasoning_budget": 9}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    told = [name for delta in deltas for name in ("reasoning_content", "content") if delta.get(name)]
    assert told == sorted(told, reverse=True), "what is thought comes before what is said"
    assert {*told} == {"reasoning_content", "content"}
    assert json.loads("".join(delta.get("content") or "" for delta in deltas))["a"] in ("x", "y")


def test_messages_and_responses_do_the_same(client: httpx.Client) -> None:
    said = chat(client, reasoning_budget=9).json()["choices"][0]["message"]["content"]
    body: dict[str, Any] = {
        "messages": ASKED, "max_tokens": LENGTH, "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }  # fmt: skip
    thought, text = client.post("/v1/messages", json=body).json()["content"]
    assert (thought["type"], text["text"]) == ("thinking", said)
    body = {
        "input": "def main(", "max_output_tokens": LENGTH, "temperature": 0,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    }  # fmt: skip
    bounded = client.post("/v1/responses", json={**body, "reasoning": {"max_tokens": 9}}).json()
    assert bounded["usage"]["output_tokens_details"] == {"reasoning_tokens": 9}
    assert bounded["output"][-1]["content"][0]["text"] == said
    output = client.post("/v1/responses", json=body).json()["output"]
    assert output[0]["type"] == "reasoning"
    assert all(not item["content"][0]["text"].startswith("{") for item in output if item["type"] == "reasoning")


def thought_tokens(client: httpx.Client) -> float:
    counted = re.search(r'^edgespec_tokens_total\{kind="thought"\} (.*)$', client.get("/metrics").text, re.MULTILINE)
    return float(counted[1])


def test_tokens_of_thought_are_counted_apart(client: httpx.Client) -> None:
    before = thought_tokens(client)  # the server's other texts
    answer = chat(client, reasoning_budget=9).json()
    number = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert number == 9 < answer["usage"]["completion_tokens"]
    body = {"input": "def main(", "max_output_tokens": 9, "temperature": 0}
    details = client.post("/v1/responses", json=body).json()["usage"]["output_tokens_details"]
    client.post("/v1/completions", json={"prompt": "def main(", "max_tokens": 9})
    assert thought_tokens(client) - before == number + details["reasoning_tokens"] > number


def test_a_text_without_a_template_matches_from_its_first_token(client: httpx.Client) -> None:
    body = {
        "prompt": "def main(",
        "max_tokens": LENGTH,
        "temperature": 0,
        "response_format": FORMAT,
        "reasoning_budget": 3,
    }
    response = client.post("/v1/completions", json=body)
    assert json.loads(response.json()["choices"][0]["text"])["a"] in ("x", "y")
    assert response.headers["X-Edgespec-Unused"] == "reasoning_budget"


def test_a_budget_that_is_no_number_of_tokens_is_refused(client: httpx.Client) -> None:
    for wish in ({"reasoning_budget": -2}, {"reasoning": {"max_tokens": "many"}}):
        response = client.post("/v1/chat/completions", json={"messages": ASKED, **wish})
        assert response.status_code == 400
        assert next(iter(wish)) in response.json()["error"]["message"]
