"""Rows of an OpenAI batch go where their `url` says, and one that cannot is an error of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine
from edgespec.cli.prompts.batch_rows import endpoint_fault
from edgespec.cli.prompts.rows import parse_row
from edgespec.errors import EdgespecError
from edgespec.serve.response_items import items_of
from tests.cli.conftest import RunCli

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
CHAT, TEXT = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 3}, {"prompt": "def main("}
OPTIONS = ["-md", "none", "--policy", "none", "--temp", "0", "-n", "5", "--chat-template", "t.jinja", "--ordered"]


def row(name: str, url: str, body: Any, method: str = "POST") -> dict[str, Any]:
    return {"custom_id": name, "method": method, "url": url, "body": body}


def batch(*rows: dict[str, Any]) -> dict[str, str]:
    return {"in.jsonl": "".join(json.dumps(each) + "\n" for each in rows), "t.jinja": TEMPLATE}


def test_each_row_is_read_as_its_endpoint_does_and_the_others_run(run_cli: RunCli, tmp_path: Path) -> None:
    with Engine.from_pretrained(dtype="float32", self_check=False) as engine:
        ids = engine.pair.tokenizer.encode("def main(")
        expected = engine.generate("def main(", max_new_tokens=16, temperature=0)
    files = batch(
        row("chat", "/v1/chat/completions", CHAT),
        row("text", "https://api.example.org/v1/completions/", TEXT),
        row("ids", "/v1/completions", {"prompt": [ids], "max_tokens": 16}),
        row("embedding", "/v1/embeddings", {"input": "a"}),
        row("response", "/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
        row("get", "/v1/completions", TEXT, method="GET"),
        row("swapped", "/v1/completions", CHAT),
    )
    command = ["in.jsonl", *OPTIONS, "--format", "openai-batch", "-o", "out.jsonl"]
    outcome = run_cli(command, files=files).ended(3)
    lines = [json.loads(line) for line in (tmp_path / "cwd" / "out.jsonl").read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    for name in ("text", "ids"):
        body = found[name]["response"]["body"]
        assert body["usage"]["prompt_tokens"] == len(ids)
        assert body["choices"][0]["text"] == expected.text
    assert found["chat"]["response"]["body"]["usage"]["prompt_tokens"] > len(ids) + 3
    said = {name: found[name]["error"]["message"] for name in ("embedding", "response", "get", "swapped")}
    assert "/v1/embeddings" in said["embedding"]
    assert "previous_response_id" in said["response"]
    assert "GET" in said["get"]
    assert '"prompt"' in said["swapped"]
    assert "line 4 (its url is /v1/embeddings" in outcome.err

    again = run_cli([*command, "--resume"], files=files)
    assert (again.code, "3 of 7 prompts are done, 4 failed and run again" in again.err) == (2, True)
    assert [json.loads(line) for line in (tmp_path / "cwd" / "out.jsonl").read_text().splitlines()] == lines
    files = batch(
        row("chat", "/v1/chat/completions", CHAT),
        row("text", "/v1/completions", {**TEXT, "max_tokens": 16}),
        row("ids", "/v1/completions", {"prompt": [ids], "max_tokens": 16}),
        *(row(name, "/v1/completions", {**TEXT, "max_tokens": 2}) for name in said),
    )
    mended = run_cli([*command, "--resume"], files=files)
    assert (mended.code, "3 of 7 prompts are done" in mended.err) == (0, True)
    lines = [json.loads(line) for line in (tmp_path / "cwd" / "out.jsonl").read_text().splitlines()]
    assert all(line["error"] is None for line in lines)
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"url": "/v1/chat/completions", "body": {"prompt": "a"}}, '"messages"'),
        ({"url": "/v2/completions", "body": {"prompt": "a"}}, "/v2/completions"),
        ({"url": 7, "body": {"prompt": "a"}}, "7"),
        ({"url": "http://[half/v1/completions", "body": {"prompt": "a"}}, "http://[half/v1/completions"),
        ({"url": "http://a\u2100b/v1/completions", "body": {"prompt": "a"}}, "/v1/completions, which"),
        ({"method": "DELETE", "body": {"prompt": "a"}}, "DELETE"),
        ({"url": "/v1/score", "body": {}}, "/v1/score"),
        ({"url": "/v1/completions", "method": "post", "body": {"prompt": "a"}}, None),
        ({"body": {"prompt": "a"}}, None),
    ],
)
def test_what_is_no_endpoint_is_named(given: dict[str, Any], named: str | None) -> None:
    fault = endpoint_fault(given)
    assert (fault is None) == (named is None)
    assert named is None or named in str(fault)
    assert (parse_row(given, "line 1").fault is None) == (fault is None)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1.5], [True], {"a": 1}, [], ""])
def test_a_row_has_one_prompt(prompt: Any) -> None:
    with pytest.raises(EdgespecError, match="line 1"):
        parse_row({"url": "/v1/completions", "body": {"prompt": prompt}}, "line 1")


def test_a_url_beside_a_prompt_is_no_endpoint() -> None:
    """As in sets of questions, whose rows tell where they come from."""
    assert parse_row({"prompt": "a", "url": "https://example.org/page", "method": "crawl"}, "line 1").fault is None


def test_a_response_is_what_chat_completions_write(run_cli: RunCli, tmp_path: Path) -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": None}
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    said = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "def main("}]
    chats = [
        {"messages": said[1:], "max_tokens": 5},
        {"messages": said, "max_tokens": 5, "top_k": 1},
        {"messages": said[1:], "max_tokens": 40, "response_format": {"type": "json_object"}},
        {"messages": said, "max_tokens": 5, "tools": [{"type": "function", "function": function}]},
    ]
    asked = {"input": "def main(", "max_output_tokens": 5}
    responses = [
        {**asked, "store": False, "include": [], "truncation": "disabled"},
        {**asked, "input": said, "top_k": 1},
        {**asked, "max_output_tokens": 40, "text": {"format": {"type": "json_object"}}},
        {**asked, "instructions": "Be short.", "tools": [tool, {"type": "web_search"}], "tool_choice": "auto"},
    ]
    files = batch(
        *(row(f"c{number}", "/v1/chat/completions", body) for number, body in enumerate(chats)),
        *(row(f"r{number}", "/v1/responses", body) for number, body in enumerate(responses)),
    )
    outcome = run_cli(["in.jsonl", *OPTIONS, "--format", "openai-batch", "-o", "out.jsonl"], files=files).ended()
    lines = [json.loads(line) for line in (tmp_path / "cwd" / "out.jsonl").read_text().splitlines()]
    bodies = [line["response"]["body"] for line in lines]
    for chat, response in zip(bodies[:4], bodies[4:], strict=True):
        (item,) = response["output"]
        assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        is_cut = chat["choices"][0]["finish_reason"] == "length"
        assert (response["status"], item["status"]) == (("incomplete",) * 2 if is_cut else ("completed",) * 2)
        assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert "tools[web_search]" in outcome.err


def test_items_of_a_message_are_those_that_the_server_writes() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    thought, text, called = items_of({"reasoning_content": "hm", "content": "a", "tool_calls": [call]}, "incomplete")
    assert (thought["type"], thought["content"][0]["text"], thought["status"]) == ("reasoning", "hm", "completed")
    assert (text["type"], text["content"][0]["text"]) == ("message", "a")
    assert (called["name"], called["arguments"], called["status"]) == ("look", "{}", "incomplete")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": 7}, "input"),
        ({"input": [7]}, "input"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"input": "a", "text": "json"}, '"text"'),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "xml"),
        ({"input": "a", "tools": {"type": "function"}}, '"tools"'),
        ({"input": "a", "tools": [{"type": "function"}]}, "name"),
        ({"messages": []}, '"input"'),
    ],
)
def test_a_response_that_cannot_be_done_is_that_rows_error(body: dict[str, Any], named: str) -> None:
    assert named in str(parse_row({"url": "/v1/responses", "body": body}, "line 1").fault)


def test_an_answer_that_is_not_complete_is_continued() -> None:
    begun = {"role": "assistant", "content": "def", "status": "in_progress"}
    told = [{"role": "user", "content": "a"}, begun]
    for status, continues in (("in_progress", True), ("completed", False)):
        row = parse_row({"url": "/v1/responses", "body": {"input": [told[0], {**begun, "status": status}]}}, "line 1")
        assert row.settings.continue_final_message is continues
