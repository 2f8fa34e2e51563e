"""OpenAI's responses, through its own client and as Codex asks for them."""

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from edgespec import Engine
from edgespec.chat.answer import AnswerPart, ToolCall
from edgespec.serve.openai_responses import WrittenItems
from edgespec.serve.responses_prompt import messages_of
from tests.edgespec.serve.conftest import events_of
from tests.edgespec.serve.test_tools import ASKED, SCHEMA, TEMPLATE

__all__ = ["TEMPLATE"]  # the pair's, which shows tools and calls
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": SCHEMA, "strict": None} for name in ("sun", "rain")
]
WAY: dict[str, Any] = {"model": "any", "max_output_tokens": 6, "temperature": 0.8}
SEED = {"seed": 7}  # no field of the client's


def expected(engine: Engine, messages: list[Any]) -> str:
    return engine.generate(messages, max_new_tokens=6, temperature=0.8, seed=7).text


def test_the_text_is_the_engines_whole_and_streamed(openai: OpenAI, engine: Engine) -> None:
    text = expected(engine, [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}])
    asked: dict[str, Any] = {**WAY, "instructions": "Be short.", "input": "Hello", "extra_body": SEED}
    whole = openai.responses.create(**asked)
    assert whole.output_text == text
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 6
    with openai.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text


def test_every_event_of_a_text_comes_in_its_order(openai: OpenAI) -> None:
    events = list(openai.responses.create(**WAY, input=ASKED, extra_body=SEED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip


# As Codex writes it after its own documentation: a session's first request, and the next with a call's result
CODEX: dict[str, Any] = {
    "model": "local", "instructions": "You are a coding agent.", "tool_choice": "auto", "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True, "temperature": 0.8,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"}, "max_output_tokens": 200, "seed": 1,
    "tools": [*TOOLS, {"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}],
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "namespace", "name": "n", "tools": []}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "The weather?"}]},
    ],
}  # fmt: skip


def told(address: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of an answer."""
    with httpx.stream("POST", f"{address}/v1/responses", json=body, timeout=60) as response:
        return events_of(response)


def test_codex_gets_a_call_and_sends_its_result(address: str, caplog: pytest.LogCaptureFixture) -> None:
    named = {"type": "function", "name": "rain"}
    events = told(address, {**CODEX, "tool_choice": named})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert all(f"'tools[{kind}]' is taken and has no effect" in caplog.text for kind in ("web_search", "custom"))
    call = events[-2]["item"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "rain", "completed")
    assert json.loads(call["arguments"])["city"] in {"Paris", "Rome"}
    response = events[-1]["response"]
    assert response["output"] == [call]
    assert [tool["name"] for tool in response["tools"]] == ["sun", "rain"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It rains."}
    following = told(address, {**CODEX, "input": [*CODEX["input"], call, result], "max_output_tokens": 3})
    assert following[-1]["response"]["usage"]["output_tokens"] == 3
    # The conversation's rows were kept.
    assert following[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_items_become_the_messages_that_they_were() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "sun", "arguments": "{}"}
    found = messages_of("One.", [
        {"role": "developer", "content": "Two."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call, {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "It shines."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "?"},
        {"role": "assistant", "content": "Good."},
        {"role": "assistant", "content": "Bye."},
    ])  # fmt: skip
    function = {"type": "function", "function": {"name": "sun", "arguments": "{}"}}
    assert found == [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c", **function}, {"id": "d", **function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "It shines."},
        {"role": "assistant", "content": "Good."},
        {"role": "assistant", "content": "Bye."},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "always"}, "truncation"),
        ({"include": ["web_search_call.results", "message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "critic", "content": "No."}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "function", "name": "snow"}, "tools": TOOLS}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(address: str, change: dict[str, Any], field: str) -> None:
    found = httpx.post(f"{address}/v1/responses", json={"input": "Hello", "max_output_tokens": 2, **change})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == field


def test_a_text_fits_a_schema(openai: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
    found = openai.responses.create(model="any", input="The weather?", text=form, max_output_tokens=100)
    assert json.loads(found.output_text)["city"] in {"Paris", "Rome"}


def test_thoughts_words_and_calls_are_items_of_their_own() -> None:
    written = WrittenItems()
    calls = [AnswerPart(kind="call", call=ToolCall(name=name, arguments="{}")) for name in ("sun", "rain")]
    words = [AnswerPart(kind="content", text="I "), AnswerPart(kind="content", text="look.")]
    events = [
        event for part in (AnswerPart(kind="reasoning", text="Hm."), *words, *calls) for event in written.add(part)
    ]
    events += written.close(status="incomplete")
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", *(f"function_call_arguments.{what}" for what in ("delta", "done")), "output_item.done"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    said = [kind.format("output_text") for kind in text]
    assert kinds == [*(kind.format("reasoning_text") for kind in text), *said[:2], said[2], *said[2:], *call, *call]
    assert [event.get("output_index") for event in events if event["type"].endswith("item.done")] == [0, 1, 2, 3]
    assert [(item["type"], item["status"]) for item in written.items] == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "completed"),
        ("function_call", "incomplete"),
    ]  # fmt: skip
    assert written.items[1]["content"][0]["text"] == "I look."
    assert len({item["id"] for item in written.items}) == 4
