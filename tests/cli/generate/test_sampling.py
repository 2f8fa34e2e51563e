"""`edgespec generate` with penalties, bias, grammars and log-probabilities: rows, flags, and what is written."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunCli, jsonl, records

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.25}


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["p.jsonl", "-m", str(pair_folders[0]), "-md", str(pair_folders[1]), "--temp", "0", "-n", "6", "--ordered",
            "--format", "jsonl"]  # fmt: skip


def test_rows_and_flags_set_penalties_and_rows_count_more(run_cli: RunCli, options: list[str]) -> None:
    flags = "--repeat-penalty 1.1 --presence-penalty 1 --frequency-penalty 0.1 --logit-bias a=2 --logit-bias 66-3.5"
    own = {**PENALTIES, "logit_bias": {"68": 1, "f": -2}, "ignore_eos": True}
    files = jsonl([{"prompt": "x"}, {"prompt": "x", **own}, {"custom_id": "c", "body": {"prompt": "x", **PENALTIES}}])
    first, second, third = (record["sampling"] for record in records(run_cli([*options, *flags.split()], files=files)))
    run = {"repetition_penalty": 1.1, "presence_penalty": 1.0, "frequency_penalty": 0.1, "ignore_eos": False}
    index = {letter: str(place) for place, letter in enumerate(_alphabet())}
    assert first.items() >= {**run, "logit_bias": {index["a"]: 2.0, "66": -3.5}}.items()
    assert second.items() >= {**own, "logit_bias": {"68": 1.0, index["f"]: -2.0}}.items()
    assert third.items() >= {**PENALTIES, "logit_bias": first["logit_bias"]}.items()


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def test_a_schema_shapes_the_text_by_flag_file_or_row(run_cli: RunCli, options: list[str]) -> None:
    pytest.importorskip("llguidance")
    options += ["-n", "100"]
    rows = jsonl([{"prompt": "x"}, {"prompt": "y", "response_format": {"type": "text"}}])
    schema = json.dumps(SCHEMA)
    files = {**rows, "s.json": schema, "g.gbnf": 'root ::= "ab" "c"?\n'}
    for given in (schema, "s.json"):
        found, other = records(run_cli([*options, "--json-schema", given], files=files))
        if found["finish_reason"] == "stop":
            assert json.loads(found["text"])["a"] in {1, 2}
        assert found["text"].startswith("{")
        assert not other["text"].startswith("{"), "the row wants text"
    found, _ = records(run_cli([*options, "--grammar", "g.gbnf"], files=files))
    assert (found["text"] in {"ab", "abc"}, found["finish_reason"]) == (True, "stop")
    (found,) = records(run_cli(options, files=jsonl([{"prompt": "x", "response_format": FORMAT}])))
    assert found["text"].startswith("{")
    assert found["row_settings"] == {"response_format": FORMAT}


def test_logprobs_are_told_for_each_token_in_records_and_in_openais_forms(run_cli: RunCli, options: list[str]) -> None:
    chat = {"messages": [{"role": "user", "content": "def"}], "logprobs": True, "top_logprobs": 2}
    files = jsonl([{"body": chat}, {"body": {"prompt": "def", "logprobs": 2}}, {"prompt": "def"}])
    options += ["--tree-size", "4"]  # as it is, so that runs round alike
    told = records(run_cli(options, files=files))
    for record in told[:2]:
        assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
        for entry in record["logprobs"]:
            best = entry["top_logprobs"]
            assert len(best) == 2
            assert entry["logprob"] == best[0]["logprob"] >= best[1]["logprob"], "the text is greedy"
            assert entry["bytes"] is not None
            assert math.exp(best[0]["logprob"]) + math.exp(best[1]["logprob"]) <= 1 + 1e-9
    assert told[2]["logprobs"] is None
    (zero,) = records(run_cli([*options, "--logprobs", "0"], files=jsonl([{"prompt": "def"}])))
    assert [entry["top_logprobs"] for entry in zero["logprobs"]] == [[]] * 6
    bodies = [
        line["response"]["body"] for line in records(run_cli([*options, "--format", "openai-batch"], files=files))
    ]
    first, second, third = (body["choices"][0]["logprobs"] for body in bodies)
    assert first == {"content": told[0]["logprobs"], "refusal": None}
    assert second["tokens"] == [entry["token"] for entry in told[1]["logprobs"]]
    assert second["token_logprobs"] == [entry["logprob"] for entry in told[1]["logprobs"]]
    assert [len(best) for best in second["top_logprobs"]] <= [2] * 6
    assert second["text_offset"] == [sum(map(len, second["tokens"][:count])) for count in range(6)]
    assert third is None


def test_the_models_own_penalty_holds_for_greedy_texts_too(
    run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """As in transformers; a flag counts more."""
    folder = shutil.copytree(pair_folders[0], tmp_path / "target")
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3, "eos_token_id": 256}))
    command = ["p.jsonl", "-m", str(folder), "-n", "2", "--format", "jsonl"]
    (found,) = records(run_cli(command, files=jsonl(["x"])))
    assert (found["sampling"]["temperature"], found["sampling"]["repetition_penalty"]) == (0.0, 1.3)
    (found,) = records(run_cli([*command, "--repetition-penalty", "1"], files=jsonl(["x"])))
    assert found["sampling"]["repetition_penalty"] == 1
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": -1, "eos_token_id": 256}))
    assert "generation_config.json" in run_cli(command, files=jsonl(["x"])).ended(2).err


def test_results_of_other_penalties_are_not_gone_on_with(run_cli: RunCli, options: list[str]) -> None:
    assert run_cli([*options, "-o", "out.jsonl"], files=jsonl(["x"])).code == 0
    for flags, named in (
        (["--repeat-penalty", "1.5"], "repetition_penalty 1.0 there, 1.5 here"),
        (["--logit-bias", "5=2"], 'logit_bias {} there, {"5": 2.0} here'),
        (["--ignore-eos"], "ignore_eos false there, true here"),
        (["--logprobs", "2"], "logprobs null there, 2 here"),
        (["--json-schema", "{}"], 'grammar null there, "json_schema {}" here'),
    ):
        assert named in run_cli([*options, "-o", "out.jsonl", "--resume", *flags]).ended(2).err


@pytest.mark.parametrize(
    ("row", "flags", "said"),
    [
        ({"repetition_penalty": 0}, [], "line 1: repetition_penalty 0 is not in (0, 100)"),
        ({"presence_penalty": "high"}, [], "line 1: presence_penalty 'high' is not a finite number"),
        ({"frequency_penalty": True}, [], "line 1: frequency_penalty True is not a finite number"),
        ({"logit_bias": [[5, 1]]}, [], "line 1: logit_bias [[5, 1]] is not an object"),
        ({"logit_bias": {"5": "x"}}, [], "line 1: logit_bias.5 'x' is not a finite number"),
        ({"logit_bias": {"5": 101}}, [], "line 1: logit_bias of 5 is 101"),
        ({"logit_bias": {"999": 1}}, [], "line 1: logit_bias has token 999, and the model knows"),
        ({"logit_bias": {"abc": 1}}, [], "line 1: logit_bias names 'abc', which is 3 tokens"),
        ({"ignore_eos": 1}, [], "line 1: ignore_eos 1 is not true or false"),
        ({"response_format": "json"}, [], "line 1: response_format 'json' is wrong"),
        ({"response_format": {"type": "xml"}}, [], 'line 1: response_format has type "xml"'),
        ({"response_format": {"type": "json_schema"}}, [], "line 1: response_format of type json_schema has no schema"),
        ({"response_format": {**FORMAT, "json_schema": {"schema": {"type": "foo"}}}}, [], "line 1: the JSON schema"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, [], "must be able to end"),
        ({"logprobs": True, "top_logprobs": 21}, [], "line 1: top_logprobs 21 is not 20 or less"),
        ({"top_logprobs": 2}, [], "line 1: top_logprobs 2 is wrong"),
        ({"logit_bias": {"9" * 30: 1}}, [], "which is 30 tokens of this model"),
        ({"logprobs": -1}, [], "line 1: logprobs -1 is not 0 or more"),
        ({}, ["--presence-penalty", "2.5"], "--presence-penalty 2.5 is not in [-2, 2]"),
        ({}, ["--logit-bias", "5"], "'5' is no TOKEN=BIAS"),
        ({}, ["--logit-bias", "5=x"], "'5=x' is no TOKEN=BIAS"),
        ({}, ["--logit-bias", "999=1"], "--logit-bias has token 999"),
        ({}, ["--logprobs", "21"], "21 is not in the range"),
        ({}, ["--json-schema", '{"type": "foo"}'], "the JSON schema cannot be followed: Invalid type: foo"),
        ({}, ["--json-schema", "missing.json"], "there is no file 'missing.json'"),
        ({}, ["--grammar", "p.jsonl"], "the grammar cannot be followed"),
        ({}, ["--grammar", "never.gbnf"], "--grammar: the grammar cannot be followed: it allows no first token"),
        ({}, ["-j", '{"enum": []}'], "--json-schema: the JSON schema cannot be followed"),
        ({}, ["--json-schema", "{}", "--grammar", "g"], "give --json-schema or --grammar"),
        ({}, ["--json-schema", "{}", "--ignore-eos"], "must be able to end"),
    ],
)
@pytest.mark.usefixtures("no_weights_read")
def test_what_is_wrong_is_said_before_a_weight_is_read(
    row: dict[str, Any], flags: list[str], said: str, run_cli: RunCli, options: list[str]
) -> None:
    pytest.importorskip("llguidance")
    files = {**jsonl([{"prompt": "x", **row}]), "never.gbnf": 'root ::= root "a"'}
    outcome = run_cli([*options, *flags], files=files)
    assert outcome.code in {2, 4}, outcome.err
    assert said in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.count("Error:") == 1
