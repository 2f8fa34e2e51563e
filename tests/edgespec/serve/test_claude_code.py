"""Anthropic's messages as Claude Code asks for them: bodies written after their documentation, and every event."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.edgespec.serve.conftest import Started, events_of
from tests.edgespec.serve.test_tools import SCHEMA

pytestmark = pytest.mark.usefixtures("form")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}\n\n{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)
# Qwen's form, but that a thought ends where the built-in pair ends one: at an empty line
FORM = {
    "markers": ["<tool_call>"],
    "fields": {
        "reasoning": {"open": "<think>", "close": "\n\n"},
        "calls": {
            "repeats": True, "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json",
            "transform": {"function": "{content}"},
        },
        "content": {"content": "text"},
    },
    "call": {"mark": "<tool_call>", "close": "</tool_call>", "name": "name", "arguments": "arguments"},
}  # fmt: skip
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "authorization": "Bearer any", "user-agent": "claude-cli/2.1.0 (external, cli)", "x-app": "cli",
    "x-stainless-lang": "js", "x-stainless-retry-count": "0",
}  # fmt: skip
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PROMPT: dict[str, Any] = {
    "model": "claude-local",
    "system": [
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Today is sunny.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be short.</system-reminder>"},
                {"type": "text", "text": "def weather():\n    return 1\n", **CACHED},
            ],
        }
    ],
    "tools": [
        {
            "name": name, "description": "Looks.", "eager_input_streaming": True,
            "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMA},
        }
        for name in ("Sun", "Rain")
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip
ASKED = {**PROMPT, "max_tokens": 32000, "metadata": {"user_id": "a"}, "stream": True, "temperature": 1}
NAMED = {"tool_choice": {"type": "tool", "name": "Rain"}}


@pytest.fixture
def client(start: Started) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=start()[1], headers=HEADERS, timeout=60) as client:
        yield client


def told(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of an answer, but for signs of life."""
    with client.stream("POST", "/v1/messages?beta=true", json=body) as response:
        return [event for event in events_of(response) if event["type"] != "ping"]


def test_a_thought_and_a_call_are_told_event_by_event_and_the_result_is_read(client: httpx.Client) -> None:
    counted = client.post("/v1/messages/count_tokens?beta=true", json=PROMPT).json()
    events = told(client, {**ASKED, **NAMED})
    message = events[0]["message"]
    assert (message["type"], message["role"], message["content"], message["stop_reason"]) == (
        "message", "assistant", [], None,
    )  # fmt: skip
    assert message["usage"] == {
        "input_tokens": counted["input_tokens"], "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }  # fmt: skip
    kinds = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    assert list(dict.fromkeys(kinds)) == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "input_json_delta"),
        ("content_block_stop", 1, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert blocks[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert (blocks[1]["type"], blocks[1]["name"], blocks[1]["input"]) == ("tool_use", "Rain", {})
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    thought = "".join(delta.get("thinking", "") for delta in deltas)
    given = json.loads("".join(delta.get("partial_json", "") for delta in deltas))
    assert given["city"] in {"Paris", "Rome"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0

    said = {"role": "assistant", "content": [
        {"type": "thinking", "thinking": thought, "signature": ""}, {**blocks[1], "input": given, **CACHED},
    ]}  # fmt: skip
    result = {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "It rains.", "is_error": False, **CACHED},
        {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"},
    ]}  # fmt: skip
    body = {**ASKED, "messages": [*PROMPT["messages"], said, result], "thinking": {"type": "disabled"}, "max_tokens": 3}
    following = told(client, body)
    kinds = [(event["type"], event.get("delta", {}).get("type")) for event in following]
    assert list(dict.fromkeys(kinds)) == [
        ("message_start", None), ("content_block_start", None), ("content_block_delta", "text_delta"),
        ("content_block_stop", None), ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    assert following[-2]["delta"]["stop_reason"] == "max_tokens"
    usage = following[-2]["usage"]
    assert usage["output_tokens"] == 3
    assert usage["cache_read_input_tokens"] > counted["input_tokens"] / 2  # the conversation's rows were kept


def test_a_result_that_is_an_error_reaches_the_model_as_one(client: httpx.Client) -> None:
    def counted(content: Any, **failed: Any) -> int:
        used = {"type": "tool_use", "id": "a", "name": "Rain", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": content, **failed}
        said = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        body = {**PROMPT, "messages": [*PROMPT["messages"], *said]}
        return int(client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    plain, told = counted("no such city"), counted("Error: no such city")
    assert plain == counted("no such city", is_error=False) < told
    assert counted("no such city", is_error=True) == counted("Error: no such city", is_error=True) == told
    assert counted([], is_error=True) == counted("Error: ")


def test_whole_answers_to_what_it_asks_beside_the_conversation(client: httpx.Client) -> None:
    quota = {"model": "claude-local", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    found = client.post("/v1/messages?beta=true", json={**quota, "metadata": {"user_id": "a"}}).json()
    assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("max_tokens", 1)
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        found = client.post("/v1/messages", json={**quota, "max_tokens": 100, **fields}).json()
        assert json.loads(found["content"][0]["text"])["city"] in {"Paris", "Rome"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type"),
        (
            {"context_management": {"edits": [
                {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
            ]}},
            "context_management.edits.0.keep",
        ),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]}, "mcp_servers"),
        ({"tools": [{**PROMPT["tools"][0], "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x", "is_error": "no"}]}]},
            "messages.0.content.0.is_error",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "weight": 2}]}]},
            "messages.0.content.0.weight",
        ),
        ({"system": [{"type": "text", "text": "x", "priority": 1}]}, "system.0.priority"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ada"}]}, "messages.0.name"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(client: httpx.Client, change: dict[str, Any], field: str) -> None:
    found = client.post("/v1/messages", json={**ASKED, **change})
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"'{field}" in error["message"]
