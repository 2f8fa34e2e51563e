"""Which tokens a row's text may have, and which end it: as in vLLM and transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunCli


@pytest.fixture
def run_rows(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> Any:
    def run(*rows: dict[str, Any], size: str = "8") -> list[dict[str, Any]]:
        options = ["-m", str(pair_folders[0]), "-md", str(pair_folders[1]), "--temp", "0", "-n", "12", "--ordered",
                   "--tree-size", size]  # fmt: skip
        files = {"p.jsonl": "".join(json.dumps({"prompt": "def main(", **row}) + "\n" for row in rows)}
        outcome = run_cli(["p.jsonl", *options, "--format", "jsonl"], files=files).ended()
        assert "not applied" not in outcome.err
        return [json.loads(line) for line in outcome.out.splitlines()]

    return run


@pytest.mark.parametrize("size", ["1", "64"])
def test_a_text_ends_with_the_first_of_a_rows_stop_tokens_and_without_its_text(run_rows: Any, size: str) -> None:
    (whole,) = run_rows({"ignore_eos": True}, size=size)
    ids = whole["token_ids"]
    stop = ids[5]
    for row in ({"stop_token_ids": [stop]}, {"stop_token_ids": [stop], "ignore_eos": True}):
        (cut,) = run_rows(row, size=size)
        end = ids.index(stop) + 1
        assert (cut["token_ids"], cut["finish_reason"]) == (ids[:end], "stop")
        assert whole["text"].startswith(cut["text"])
    assert cut["sampling"]["ignore_eos"], "the record has what the row has"


def test_no_stop_token_is_drawn_before_a_rows_least_length(run_rows: Any) -> None:
    (whole,) = run_rows({"ignore_eos": True})
    stop = whole["token_ids"][0]
    (short, long) = run_rows({"stop_token_ids": [stop]}, {"stop_token_ids": [stop], "min_tokens": 5})
    assert short["token_ids"] == [stop]
    assert len(long["token_ids"]) > 5 or long["finish_reason"] == "length"
    assert stop not in long["token_ids"][:5]
    (without,) = run_rows({"suppress_tokens": [stop], "ignore_eos": True})
    assert stop not in without["token_ids"]
    assert long["token_ids"][:5] == without["token_ids"][:5]


def test_ends_and_least_lengths_are_those_of_transformers(run_rows: Any, pair_folders: tuple[Path, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(pair_folders[0], dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(pair_folders[0])("def main(", return_tensors="pt")
    (whole,) = run_rows({"ignore_eos": True})
    stops = whole["token_ids"][2:4]
    rules = [{}, {"min_new_tokens": 3}, {"min_new_tokens": 7}]
    found = run_rows(*({"stop_token_ids": stops, **rule} for rule in rules))
    for record, rule in zip(found, rules, strict=True):
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=12, eos_token_id=[256, *stops], **rule)
        assert record["token_ids"] == ids[0, prompt["input_ids"].shape[1] :].tolist()


def test_a_next_turn_reads_an_answer_without_the_token_that_ended_it(run_rows: Any) -> None:
    (whole,) = run_rows({"ignore_eos": True})
    row = {"prompt": None, "turns": ["def main(", "x"], "stop_token_ids": [whole["token_ids"][3]]}
    (found,) = run_rows(row)
    answer = whole["token_ids"].index(whole["token_ids"][3])
    first, second = found["per_turn"]
    assert first["usage"]["completion_tokens"] == answer + 1
    assert second["usage"]["prompt_tokens"] == len("def main(") + answer + len("\nx")


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"stop_token_ids": [99999]}, "line 1: stop_token_ids has token 99999"),
        ({"suppress_tokens": [-1]}, "line 1: suppress_tokens.0 -1"),
        ({"stop_token_ids": ["x"]}, "line 1: stop_token_ids.0 'x'"),
        ({"min_tokens": -3}, "line 1: min_tokens -3"),
    ],
    ids=str,
)
def test_wrong_tokens_of_a_row_are_named_before_weights_are_read(
    row: dict[str, Any], named: str, run_cli: RunCli, pair_folders: tuple[Path, Path]
) -> None:
    files = {"p.jsonl": json.dumps({"prompt": "x", **row}) + "\n"}
    outcome = run_cli(["p.jsonl", "-m", str(pair_folders[0]), "--dry-run"], files=files)
    assert (outcome.code, named in outcome.err) == (2, True), outcome.err
