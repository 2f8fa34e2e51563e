"""`--echo-logprobs` scores prompts as a plain forward of transformers does, many rows a pass."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgespec.pair.pair import DEMO_FOLDER
from tests.cli.conftest import RunCli

TEXTS = ["def area(w, h):\n    return w", "import os", "for i in range(10):\n    print(i)"]
OPTIONS = ["-md", "none", "--policy", "none", "--temp", "0", "--ordered", "--echo-logprobs", "-np", "3"]


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    folder = DEMO_FOLDER / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        found.append([rows[place, token].item() for place, token in enumerate(ids[1:])])
    return found


@pytest.mark.parametrize("more", [["-n", "0"], ["-n", "2", "--logprobs", "1"], ["-n", "0", "-ngl", "0"]], ids=" ".join)
def test_each_rows_prompt_is_scored(run_cli: RunCli, expected: list[list[float]], more: list[str]) -> None:
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    outcome = run_cli(["in.jsonl", *OPTIONS, *more], files={"in.jsonl": rows})
    assert outcome.code == 0, outcome.err
    records = [json.loads(line) for line in outcome.out.splitlines()]
    for record, wanted in zip(records, expected, strict=True):
        first, *scored = record["prompt_logprobs"]
        assert (first["logprob"], first["top_logprobs"]) == (None, None)
        assert [entry["logprob"] for entry in scored] == pytest.approx(wanted, abs=1e-4)
        assert len(record["token_ids"]) == int(more[1])
        assert all(len(entry["top_logprobs"]) == ("--logprobs" in more) for entry in scored)


def test_a_row_may_ask_itself_and_nothing_else_has_no_length(run_cli: RunCli, expected: list[list[float]]) -> None:
    rows = json.dumps({"prompt": TEXTS[0], "prompt_logprobs": 0, "max_tokens": 0}) + "\n"
    outcome = run_cli(["in.jsonl", "-md", "none", "--policy", "none"], files={"in.jsonl": rows})
    (record,) = [json.loads(line) for line in outcome.out.splitlines()]
    assert [entry["logprob"] for entry in record["prompt_logprobs"][1:]] == pytest.approx(expected[0], abs=1e-4)
    refused = run_cli(["-p", TEXTS[0], "-n", "0"])
    assert (refused.code, "not a length" in refused.err) == (2, True)
