"""Every key of a row means something here, is named as not applied or not known, or is known to change nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.prompts.report import say_unused_keys
from edgespec.cli.prompts.row_keys import HARMLESS, NOT_APPLIED, SETTING_OF, SETTINGS
from edgespec.cli.prompts.row_settings import RowSettings
from edgespec.cli.prompts.rows import PromptRow, parse_row
from edgespec.errors import EdgespecError
from tests.cli.conftest import RunCli

SCHEMA = {"type": "object"}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def row(**keys: Any) -> PromptRow:
    return parse_row({"prompt": "a", **keys}, "line 1")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"n_predict": 5}, {"max_new_tokens": 5}),
        ({"num_predict": -1}, {"max_new_tokens": -1}),
        ({"num_predict": -2}, {"max_new_tokens": -1}),
        ({"max_output_tokens": 7.0}, {"max_new_tokens": 7}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {}),
        ({"stopping_strings": ["x"]}, {"stop": ("x",)}),
        ({"stop_sequences": "x", "stopping_strings": []}, {"stop": ("x",)}),
        ({"stop": []}, {"stop": ()}),
        ({"stop": ""}, {"stop": ()}),
        ({"stop": ["", "x"]}, {"stop": ("x",)}),
        ({"ban_eos_token": True}, {"ignore_eos": True}),
        ({"do_sample": False, "temperature": 0.7}, {"do_sample": False, "temperature": 0.7}),
        ({"system_prompt": "s"}, {"system": "s"}),
        ({"n_probs": 3}, {"logprobs": 3}),
        ({"json_schema": SCHEMA}, {"response_format": WRAPPED}),
        ({"guided_json": json.dumps(SCHEMA)}, {"response_format": WRAPPED}),
        ({"grammar": "root ::= [0-9]"}, {"grammar": "root ::= [0-9]"}),
        ({"guided_choice": ["yes", 'n"o']}, {"grammar": 'start: "yes" | "n\\"o"'}),
        ({"guided_regex": r"[0-9]+/\d"}, {"grammar": "start: TEXT\nTEXT: /[0-9]+\\/\\d/"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"grammar": 'start: "a"'}),
        ({"options": {"num_predict": 4, "temperature": 0}}, {"max_new_tokens": 4, "temperature": 0}),
        ({"parameters": {"max_new_tokens": 4, "stop": ["x"]}}, {"max_new_tokens": 4, "stop": ("x",)}),
        ({"max_tokens": 4, "n_predict": 4.0, "options": {"num_predict": 4}}, {"max_new_tokens": 4}),
    ],
    ids=str,
)
def test_other_tools_names_mean_what_ours_do(given: dict[str, Any], meant: dict[str, Any]) -> None:
    found = row(**given)
    assert found.settings.set_values() == meant
    assert not found.ignored_keys | found.unknown_keys
    assert parse_row({"body": {"prompt": "a", **given}}, "line 1").settings == found.settings


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_tokens": 4, "num_predict": 5}, "both max_tokens and num_predict"),
        ({"temperature": 1, "options": {"temperature": 0}}, "both temperature and options.temperature"),
        ({"stop": "a", "stop_sequences": ["b"]}, "both stop and stop_sequences"),
        ({"repeat_penalty": -1}, "repeat_penalty -1"),
        ({"do_sample": 0}, "do_sample 0"),
        ({"guided_choice": "yes"}, "guided_choice 'yes'"),
        ({"guided_choice": ["a"], "guided_json": SCHEMA}, "both guided_json and guided_choice"),
        ({"options": {"num_predict": 0}}, "num_predict 0"),
    ],
    ids=str,
)
def test_names_that_contradict_each_other_or_have_no_meaning_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(EdgespecError) as caught:
        row(**given)
    assert caught.value.what.startswith("line 1")
    assert named in caught.value.what


def test_what_is_not_done_is_named_unless_it_asks_for_nothing() -> None:
    assert row(bad_words=["x"], no_repeat_ngram_size=3, n=2, model="m").ignored_keys == {
        "bad_words", "no_repeat_ngram_size", "n", "model",
    }  # fmt: skip
    found = row(bad_words=[], no_repeat_ngram_size=0, n=1, typical_p=1.0, echo=False, tools=None, mirostat_mode=0)
    assert not found.ignored_keys | found.unknown_keys
    assert row(think=False, add_generation_prompt=False).ignored_keys == {"think", "add_generation_prompt"}
    found = row(answer=4, metadata={"a": 1}, stream=True)
    assert not found.ignored_keys | found.unknown_keys
    found = row(options={"num_ctx": 4096, "num_thread": 4, "strange": 1}, odd=None, colour=0)
    assert (found.ignored_keys, found.unknown_keys) == ({"options.num_ctx"}, {"options.strange", "colour"})
    assert found.meta["options"] == {"num_ctx": 4096, "num_thread": 4, "strange": 1}
    found = row(options={"A": "yes", "B": "no"}, parameters={"type": "object"})
    assert (found.ignored_keys, found.unknown_keys) == (set(), {"options", "parameters"})


def test_no_key_is_in_two_lists_and_every_setting_is_one_of_rows() -> None:
    assert not SETTING_OF.keys() & NOT_APPLIED.keys()
    assert not HARMLESS & {*SETTING_OF, *NOT_APPLIED}
    assert SETTINGS.keys() == set(RowSettings.__dataclass_fields__)
    assert len(SETTING_OF) == sum(len(about.names(name)) for name, about in SETTINGS.items())


def test_unused_keys_are_said_once_with_the_number_of_their_rows(
    run_cli: RunCli, pair_folders: tuple[Path, Path]
) -> None:
    rows = [
        {"prompt": "x", "bad_words": ["y"], "tint": 1},
        {"prompt": "x", "tint": 2, "bad_words": ["y"], "echo": True},
    ]
    rows[0] |= {f"key{number}": 1 for number in range(9)}
    files = {"p.jsonl": "".join(json.dumps(one) + "\n" for one in rows)}
    models = ["-m", str(pair_folders[0]), "-md", str(pair_folders[1])]
    outcome = run_cli(["p.jsonl", *models, "--dry-run"], files=files)
    assert "not applied, only handed through to the records: bad_words (2 rows), echo (1 row)\n" in outcome.err
    assert "not known, only handed through to the records: tint (2 rows), key0 (1 row), " in outcome.err
    assert "key6 (1 row) and 2 more\n" in outcome.err
    outcome = run_cli(["p.jsonl", *models, "--dry-run", "--only", "1"], files=files)
    assert "bad_words (1 row), echo (1 row)\n" in outcome.err


def test_commands_that_run_all_rows_alike_name_what_rows_set() -> None:
    said: list[str] = []
    console: Any = SimpleNamespace(say=said.append)
    rows = [row(temperature=1, system="s", colour=1), row(temperature=0, top_k=3, echo=True)]
    say_unused_keys(console, rows, applies=False)
    assert said == [
        "not applied, so that all prompts run alike: temperature (2 rows), top_k (1 row)",
        "not applied: echo (1 row)",
        "not known: colour (1 row)",
    ]


def test_a_rows_switch_of_sampling_is_transformers(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    rows = [
        {"prompt": "x", "do_sample": False},
        {"prompt": "x", "do_sample": True, "temperature": 0.5},
        {"prompt": "x"},
    ]
    rows.append({"prompt": "x", "do_sample": False, "temperature": 0.5})
    files = {"p.jsonl": "".join(json.dumps(one) + "\n" for one in rows)}
    outcome = run_cli(
        ["p.jsonl", "-m", str(pair_folders[0]), "-n", "1", "--temp", "0.9", "--ordered", "--format", "jsonl"],
        files=files,
    )
    assert [json.loads(line)["sampling"]["temperature"] for line in outcome.out.splitlines()] == [0, 0.5, 0.9, 0]


def test_a_choice_and_an_expression_shape_the_text(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    pytest.importorskip("llguidance")
    rows = [{"prompt": "x", "guided_choice": ["yes", "no/way"]}, {"prompt": "x", "guided_regex": "[ab]{2}/c"}]
    files = {"p.jsonl": "".join(json.dumps(one) + "\n" for one in rows)}
    options = ["-n", "20", "--ordered", "--format", "jsonl", "--seed", "1"]
    outcome = run_cli(["p.jsonl", "-m", str(pair_folders[0]), *options], files=files)
    first, second = [json.loads(line)["text"] for line in outcome.out.splitlines()]
    assert first in {"yes", "no/way"}
    assert (len(second), set(second[:2]) <= set("ab"), second[2:]) == (4, True, "/c")
    bad = {"p.jsonl": json.dumps({"prompt": "x", "guided_regex": "[a"}) + "\n"}
    outcome = run_cli(["p.jsonl", "-m", str(pair_folders[0]), "--dry-run"], files=bad)
    assert (outcome.code, "Error: line 1" in outcome.err) == (2, True), outcome.err
