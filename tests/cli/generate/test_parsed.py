"""The JSON of a record: what it stands for, where it is whole, and without white space."""

import json

from tests.cli.conftest import RunCli

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
ROWS = "".join(
    json.dumps(row) + "\n"
    for row in (
        {"id": "whole", "prompt": "# JSON: "},
        {"id": "cut", "prompt": "# JSON: ", "max_tokens": 4},
        {"id": "text", "prompt": "# JSON: ", "grammar": 'root ::= "1"'},
    )
)
OPTIONS = ["in.jsonl", "-n", "80", "--temp", "0", "--ordered", "--json-schema", json.dumps(SCHEMA)]


def test_a_record_has_what_its_json_stands_for_and_null_where_it_was_cut(run_cli: RunCli) -> None:
    outcome = run_cli([*OPTIONS, "--parsed", "--compact-json"], files={"in.jsonl": ROWS})
    whole, cut, text = map(json.loads, outcome.out.splitlines())
    assert whole["parsed"] == json.loads(whole["text"])
    assert whole["parsed"].keys() == {"a", "b"}
    assert (cut["finish_reason"], cut["parsed"]) == ("length", None)
    assert "parsed" not in text, "the row's own grammar is no schema"
    assert "parsed" not in json.loads(run_cli(OPTIONS, files={"in.jsonl": ROWS}).out.splitlines()[0])


def test_compact_json_has_no_white_space(run_cli: RunCli) -> None:
    whole = json.loads(run_cli([*OPTIONS, "--compact-json"], files={"in.jsonl": ROWS}).out.splitlines()[0])
    assert whole["text"] == json.dumps(json.loads(whole["text"]), separators=(",", ":"))
    refused = run_cli(["in.jsonl", "--compact-json"], files={"in.jsonl": ROWS})
    assert (refused.code, "--json-schema" in refused.err) == (2, True)
