"""Rows whose model thinks first: a form holds for the answer, and a budget for the thought."""

import json
from typing import Any

import pytest

from tests.cli.conftest import RunCli

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant><think>{{ '\\n' }}"
    "{# '\\n</think>\\n\\n' #}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
OPTIONS = ["-n", "160", "--temp", "0", "--chat-template", "t.jinja", "--dtype", "float32", "--ordered"]
ROWS = [
    {"id": "own", "prompt": "def main(", "reasoning_budget": 5},
    {"id": "runs", "messages": [{"role": "user", "content": "def main("}]},
    {"id": "none", "prompt": "def main(", "thinking_budget": 0},
    {"id": "raw", "body": {"prompt": "def main("}, "url": "/v1/completions", "max_tokens": 160},
]


def run(run_cli: RunCli, *options: str, rows: list[Any] = ROWS) -> tuple[dict[str, Any], str]:
    files = {"in.jsonl": "".join(json.dumps(row) + "\n" for row in rows), "t.jinja": TEMPLATE}
    outcome = run_cli(["in.jsonl", *OPTIONS, *options], files=files).ended()
    return {record["id"]: record for record in map(json.loads, outcome.out.splitlines())}, outcome.err


@pytest.mark.parametrize("trees", [[], ["--policy", "none", "-md", "none"]], ids=["trees", "none"])
def test_each_rows_text_is_its_answer_and_its_thought_stands_apart(run_cli: RunCli, trees: list[str]) -> None:
    found, said = run(run_cli, "--json-schema", json.dumps(SCHEMA), "--reasoning-budget", "12", *trees)
    for record in found.values():
        assert json.loads(record["text"])["a"] in ("x", "y")
    thoughts = {name: record.get("message", {}).get("reasoning_content", "") for name, record in found.items()}
    assert not thoughts["none"].strip()
    assert not thoughts["raw"]
    assert thoughts["runs"].startswith(thoughts["own"].rstrip("\n"))
    assert len(thoughts["runs"]) > len(thoughts["own"]) > 0
    assert found["runs"]["config"]["reasoning_budget"] == [12, ""]
    assert "the grammar of a prompt without a template holds from its first token: line 4" in said


def test_tokens_of_thought_are_counted_apart(run_cli: RunCli) -> None:
    """Also where the text has the thought and its marks, and in the lines of a batch."""
    form = ["--json-schema", json.dumps(SCHEMA)]
    found, _ = run(run_cli, "--reasoning-budget", "12", *form)
    numbers = {name: record["usage"]["reasoning_tokens"] for name, record in found.items()}
    assert numbers == {"own": 5, "runs": 12, "none": 0, "raw": 0}
    free, _ = run(run_cli, "--reasoning-budget", "12")
    assert {name: record["usage"]["reasoning_tokens"] for name, record in free.items()} == numbers
    calls = [{"custom_id": "a", "method": "POST", "url": f"/v1/{url}", "body": {**body, "reasoning_budget": 12}}
             for url, body in (("chat/completions", {"messages": ROWS[1]["messages"]}),
                               ("responses", {"input": "def main("}))]  # fmt: skip
    for call, (name, number) in zip(
        calls, {"completion": numbers["runs"], "output": numbers["runs"]}.items(), strict=True
    ):
        files = {"in.jsonl": json.dumps(call) + "\n", "t.jinja": TEMPLATE}
        outcome = run_cli(["in.jsonl", *OPTIONS, *form, "--format", "openai-batch"], files=files)
        usage = json.loads(outcome.out)["response"]["body"]["usage"]
        assert usage[f"{name}_tokens_details"] == {"reasoning_tokens": number}


def test_a_budget_that_leaves_no_token_for_an_answer_is_said(run_cli: RunCli) -> None:
    rows = [{**ROWS[1], "max_tokens": most} for most in (8, 60)]
    _, said = run(run_cli, "--reasoning-budget", "5", rows=[{**row, "id": str(n)} for n, row in enumerate(rows)])
    assert "the budget of thought may leave no token for an answer: line 1\n" in said


@pytest.mark.parametrize(
    "other",
    [
        ["--reasoning-budget", "4", "--json-schema", json.dumps(SCHEMA)],
        ["--reasoning-budget", "3", "--json-schema", json.dumps({**SCHEMA, "title": "another"})],
        ["--reasoning-budget", "3", "--json-schema", json.dumps(SCHEMA), "--reasoning-budget-message", "So:"],
    ],
    ids=["budget", "schema", "closing words"],
)
def test_resuming_compares_budget_schema_and_closing_words(run_cli: RunCli, other: list[str]) -> None:
    first = ["--reasoning-budget", "3", "--json-schema", json.dumps(SCHEMA)]
    run(run_cli, *first, "-o", "out.jsonl", rows=ROWS[1:2])
    files = {"in.jsonl": json.dumps(ROWS[1]) + "\n", "t.jinja": TEMPLATE}
    codes = [
        run_cli(["in.jsonl", *OPTIONS, *own, "-o", "out.jsonl", "--resume"], files=files).code for own in (first, other)
    ]
    assert codes == [0, 2]
