"""Rows of an OpenAI batch go where their `url` says, and one that cannot is an error of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine
from edgespec.cli.prompts.batch_rows import endpoint_fault
from edgespec.cli.prompts.rows import parse_row
from edgespec.errors import EdgespecError
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
        row("response", "/v1/responses", {"input": "a"}),
        row("get", "/v1/completions", TEXT, method="GET"),
        row("swapped", "/v1/completions", CHAT),
    )
    command = ["in.jsonl", *OPTIONS, "--format", "openai-batch", "-o", "out.jsonl"]
    outcome = run_cli(command, files=files)
    assert outcome.code == 3
    lines = [json.loads(line) for line in (tmp_path / "cwd" / "out.jsonl").read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    for name in ("text", "ids"):
        body = found[name]["response"]["body"]
        assert body["usage"]["prompt_tokens"] == len(ids)
        assert body["choices"][0]["text"] == expected.text
    assert found["chat"]["response"]["body"]["usage"]["prompt_tokens"] > len(ids) + 3
    said = {name: found[name]["error"]["message"] for name in ("embedding", "response", "get", "swapped")}
    assert "/v1/embeddings" in said["embedding"]
    assert "/v1/responses" in said["response"]
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
