"""Tools of rows: calls come back in OpenAI's form, and what a row asks of them is enforced or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunCli, jsonl, written
from tests.edgespec.serve.test_tools import OPENAI as TOOLS
from tests.edgespec.serve.test_tools import TEMPLATE

ASKED = [{"role": "user", "content": "The weather?"}]
CALL = {"id": "c", "type": "function", "function": {"name": "sun", "arguments": '{"city": "Rome"}'}}
TOLD = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "It shines."},
]
COMMON = ["p.jsonl", "--chat-template", "t.jinja", "--seed", "1", "-o", "out.jsonl"]


def files(*rows: dict[str, Any]) -> dict[str, str]:
    return {**jsonl(rows), "t.jinja": TEMPLATE}


def check(message: dict[str, Any], *names: str) -> None:
    (call,) = message["tool_calls"]
    assert (message["role"], message["content"], call["type"]) == ("assistant", None, "function")
    assert call["function"]["name"] in names
    assert json.loads(call["function"]["arguments"])["city"] in {"Paris", "Rome"}


def test_calls_come_back_and_results_are_read(run_cli: RunCli) -> None:
    named = {"type": "function", "function": {"name": "rain"}}
    few = {"max_tokens": 3}
    outcome = run_cli(
        [*COMMON, "-n", "200"],
        files=files(
            {"id": "any", "messages": ASKED, "tools": TOOLS, "tool_choice": "required"},
            {"id": "named", "messages": ASKED, "tools": TOOLS, "tool_choice": named},
            {"id": "told", "messages": TOLD, "tools": TOOLS, **few},
            {"id": "none", "messages": TOLD, "tools": TOOLS, "tool_choice": "none", **few},
            {"id": "plain", "messages": TOLD, **few},
        ),
    )
    assert outcome.code == 0, outcome.err
    found = {record["id"]: record for record in written()}
    check(found["any"]["message"], "sun", "rain")
    check(found["named"]["message"], "rain")
    assert {name for name, record in found.items() if record["finish_reason"] == "tool_calls"} == {"any", "named"}
    assert found["any"]["text"] == ""
    assert found["told"]["message"]["content"] == found["told"]["text"]
    assert "message" not in found["none"]
    prompts = {name: record["usage"]["prompt_tokens"] for name, record in found.items()}
    assert prompts["none"] == prompts["plain"] < prompts["told"]
    assert "nothing to do" in run_cli([*COMMON, "-n", "200", "--resume"]).ended().err


def test_forms_of_other_tools_have_the_calls(run_cli: RunCli) -> None:
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    rows = files({"custom_id": "a", "body": body})
    assert run_cli([*COMMON, "--format", "openai-batch"], files=rows).code == 0
    (choice,) = written()[0]["response"]["body"]["choices"]
    check(choice["message"], "sun", "rain")
    assert choice["finish_reason"] == "tool_calls"
    shown = run_cli([*COMMON[:-2], "--format", "text"], files=rows).ended()
    assert shown.out.strip().partition(" ")[0] in {"sun", "rain"}
    assert run_cli([*COMMON[:-1], "out.txt", "--format", "text"], files=rows).code == 0
    assert Path("out.txt").read_text().strip() == shown.out.strip()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "snow"}}}, "tool_choice names 'snow'"),
        ({"tool_choice": "required", "tools": []}, "tool_choice requires a call, and there are no tools"),
        ({"tool_choice": "sometimes"}, "tool_choice 'sometimes' is none of none, auto, required"),
        ({"tools": [{"type": "web_search"}]}, "is no function with a name"),
        ({"tools": [{"type": "function", "function": {"name": "sun", "strict": "yes"}}]}, "tools.0.function.strict"),
        ({"tool_choice": 3}, "tool_choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_row(run_cli: RunCli, change: dict[str, Any], words: str) -> None:
    row = {"messages": ASKED, "tools": TOOLS, "max_tokens": 2, **change}
    outcome = run_cli(COMMON, files=files(row)).ended(2)
    assert "line 1" in outcome.err
    assert words in outcome.err


def test_a_call_is_not_required_without_a_template(run_cli: RunCli) -> None:
    row = {"messages": ASKED, "tools": TOOLS, "max_tokens": 2}
    outcome = run_cli(["p.jsonl"], files=jsonl([{**row, "tool_choice": "required"}])).ended(2)
    assert "line 1: tool_choice 'required' needs tools, and a chat template" in outcome.err
    assert "not applied without a chat template: tools" in run_cli(["p.jsonl"], files=jsonl([row])).err
