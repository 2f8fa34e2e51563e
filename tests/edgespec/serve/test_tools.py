"""Calls of tools and thoughts on their way to clients. Here a grammar writes the calls: the pair knows Python alone."""

import json
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED: list[Any] = [{"role": "user", "content": "The weather?"}]
OPENAI: list[Any] = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("sun", "rain")]
ANTHROPIC: list[Any] = [{"name": name, "input_schema": SCHEMA} for name in ("sun", "rain")]


def test_a_required_call_is_made_and_its_arguments_fit(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": ASKED, "tools": OPENAI, "max_tokens": 200, "seed": 1}
    whole = openai.chat.completions.create(**asked, tool_choice="required").choices[0]
    (call,) = whole.message.tool_calls or []
    assert whole.finish_reason == "tool_calls"
    assert call.type == "function"
    assert call.function.name in {"sun", "rain"}
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}
    named: Any = {"type": "function", "function": {"name": "rain"}}
    stream = openai.chat.completions.create(**asked, tool_choice=named, stream=True)
    deltas = [choice.delta.tool_calls[0] for chunk in stream for choice in chunk.choices if choice.delta.tool_calls]
    assert [delta.function.name for delta in deltas if delta.function] == ["rain"]


def test_the_result_of_a_call_is_read(openai: OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "sun", "arguments": '{"city": "Rome"}'}}
    said: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "It shines."},
    ]
    found = openai.chat.completions.create(model="any", messages=said, tools=OPENAI, max_tokens=4, seed=1)
    assert found.usage.completion_tokens == 4


def test_anthropics_client_gets_a_call_whole_and_streamed(anthropic: Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": ASKED, "tools": ANTHROPIC, "max_tokens": 200}
    choice: Any = {"type": "tool", "name": "sun"}
    whole = anthropic.messages.create(**asked, tool_choice=choice)
    (block,) = whole.content
    assert whole.stop_reason == "tool_use"
    assert block.type == "tool_use"
    assert block.name == "sun"
    assert block.input["city"] in {"Paris", "Rome"}
    with anthropic.messages.stream(**asked, tool_choice=choice) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input["city"] in {"Paris", "Rome"}
    result = [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "It shines."}]}]
    said = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": result}]
    assert anthropic.messages.create(**{**asked, "messages": said, "max_tokens": 3}).usage.output_tokens == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "snow"}}}, "no such tool"),
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "'tools.1.function' is missing"),
    ],
)
def test_choices_that_cannot_be_honoured_are_refused(address: str, change: dict[str, Any], words: str) -> None:
    body = {"messages": ASKED, "tools": OPENAI, "max_tokens": 4, **change}
    found = httpx.post(f"{address}/v1/chat/completions", json=body)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
