"""Calls of strict tools fit where the model itself chooses to call: here it does wherever it writes `def`."""

import json
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from edgespec.chat import answer
from tests.edgespec.serve.test_tools import SCHEMA, TEMPLATE

__all__ = ["TEMPLATE"]  # the pair's, which shows tools and calls
pytestmark = pytest.mark.usefixtures("form")
FORM = {
    "markers": ["<tool_call>"],
    "fields": {
        "calls": {
            "repeats": True, "open_pattern": r"\s*def", "close": "#", "content": "json",
            "transform": {"function": "{content}"},
        },
        "content": {"content": "text"},
    },
    "call": {"mark": "def", "close": "#", "name": "name", "arguments": "arguments"},
}  # fmt: skip
CODE = "import os\n\n\ndef a():\n    pass\n\n\ndef b():\n    pass\n\n\n"
ASKED: list[Any] = [{"role": "user", "content": CODE}]
FUNCTION: dict[str, Any] = {"name": "sun", "parameters": SCHEMA}
FIELDS: dict[str, Any] = {"model": "any", "temperature": 0}


def chat(address: str, *, strict: bool | None, **fields: Any) -> Any:
    tools = [{"type": "function", "function": {**FUNCTION, "strict": strict}}]
    body = {**FIELDS, "messages": ASKED, "max_tokens": 120, "tools": tools, **fields}
    found = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    return found.json()["choices"][0] if found.status_code == 200 else found.json()["error"]


def check(name: str, arguments: Any) -> None:
    assert name == "sun"
    assert arguments["city"] in {"Paris", "Rome"}


def test_words_come_first_and_every_call_fits(address: str) -> None:
    free = chat(address, strict=None)["message"]
    assert "tool_calls" not in free
    assert "def" in free["content"]  # whatever is no call is said
    choice = chat(address, strict=True, parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    check(call["function"]["name"], json.loads(call["function"]["arguments"]))
    assert choice["finish_reason"] == "tool_calls"
    calls = [
        call
        for seed in range(4)
        for call in chat(address, strict=True, seed=seed, temperature=0.3)["message"].get("tool_calls", [])
    ]
    assert calls
    for call in calls:
        check(call["function"]["name"], json.loads(call["function"]["arguments"]))


def test_a_text_without_a_call_is_the_one_that_comes_without_strict(address: str) -> None:
    drawn = {"temperature": 0.8, "max_tokens": 24, "messages": [{"role": "user", "content": "x = 1\ny = 2\n"}]}
    for seed in range(6):
        free = chat(address, strict=False, seed=seed, **drawn)["message"]
        if "def" not in free["content"]:
            assert chat(address, strict=True, seed=seed, **drawn)["message"] == free


def test_openais_client_gets_it_streamed(address: str) -> None:
    tools: list[Any] = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    with OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(
            **FIELDS, messages=ASKED, tools=tools, max_tokens=120, parallel_tool_calls=False, stream=True
        )
        deltas = [choice.delta.tool_calls[0] for chunk in stream for choice in chunk.choices if choice.delta.tool_calls]
    (function,) = (delta.function for delta in deltas)
    assert function is not None
    check(str(function.name), json.loads(function.arguments or ""))


def test_responses_and_anthropics_messages_enforce_it_too(address: str) -> None:
    tools: list[Any] = [{"type": "function", "strict": True, **FUNCTION}]
    with OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as openai:
        response = openai.responses.create(
            **FIELDS, input=CODE, tools=tools, parallel_tool_calls=False, max_output_tokens=120
        )
    (call,) = (item for item in response.output if item.type == "function_call")
    check(call.name, json.loads(call.arguments))
    assert [tool.strict for tool in response.tools if tool.type == "function"] == [True]
    tool: Any = {"name": "sun", "input_schema": SCHEMA, "strict": True}
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    with Anthropic(base_url=address, api_key="any", max_retries=0) as anthropic:
        message = anthropic.messages.create(
            model="any", messages=ASKED, max_tokens=120, tools=[tool], tool_choice=choice, extra_body={"temperature": 0}
        )
    (block,) = (block for block in message.content if block.type == "tool_use")
    check(block.name, block.input)


@pytest.mark.parametrize("strict", [None, True])
def test_beside_a_form_of_the_answer_a_tool_is_called_or_the_answer_fits(address: str, strict: bool | None) -> None:
    """The first token is biased to be that of a call, or of an answer: each of the two can be written."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}
    called = chat(address, strict=strict, response_format=given, logit_bias={"def": 60}, parallel_tool_calls=False)
    if strict:  # as any arguments fit elsewhere, they may not end
        (call,) = called["message"]["tool_calls"]
        check(call["function"]["name"], json.loads(call["function"]["arguments"]))
    else:
        assert called["message"].get("tool_calls") or called["message"]["content"].startswith("def")
    said = chat(address, strict=strict, response_format=given, logit_bias={"{": 60, "def": -100})
    assert json.loads(said["message"]["content"]) == {"a": 1}
    assert chat(address, strict=strict, response_format=given, tool_choice="required")["finish_reason"] == "tool_calls"


def test_what_cannot_be_enforced_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"type": "json_object"}
    assert "message" in chat(address, strict=True, response_format={"type": "text"}, max_tokens=2)
    monkeypatch.setattr(answer, "_known_formats", lambda: [{**FORM, "call": {}}])
    error = chat(address, strict=True)
    assert "'strict' cannot be enforced for this model: no grammar is known for calls in its form" in error["message"]
    for strict in (None, True):
        error = chat(address, strict=strict, response_format=form)
        assert "a form that tools may be called instead of cannot be enforced for this model" in error["message"]
    tool = {"type": "function", "strict": "yes", **FUNCTION}
    found = httpx.post(f"{address}/v1/responses", json={"input": "a", "tools": [tool]})
    assert found.json()["error"]["param"] == "tools.0.strict"
