"""Results in the forms of other tools: what their scripts read is there, and a run can go on with each."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.cli.generate.formats import FORMATS, Entry, read_entry
from edgespec.engine import Engine
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from tests.cli.conftest import RunCli, jsonl

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["def main(", "import os"]},
    {"question_id": 241, "category": "translation", "turns": ["x = "], "reference": ["1"]},
]
BATCH = [
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "m", "messages": [{"role": "user", "content": "def main("}], "max_tokens": 5}},
    {"custom_id": "b-2", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "import os"}},
]  # fmt: skip


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["p.jsonl", "-m", str(pair_folders[0]), "-md", str(pair_folders[1]), "--temp", "0", "-n", "6"]


def encoded(line: Any) -> bytes:
    return json.dumps(line).encode()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("cut", ["left", 5, ["left"], {"side": ["left"]}, {}])
def test_a_line_that_says_in_an_unknown_form_what_was_cut_is_no_record(cut: object) -> None:
    line = {"id": "a", "config_hash": "x", "error": None, "finish_reason": "stop"}
    assert read_entry("jsonl", encoded(line | {"truncated": {"side": "left"}})) is not None
    assert read_entry("jsonl", encoded(line | {"truncated": cut})) is None


def test_spec_bench_answers_have_the_fields_that_its_scripts_read(run_cli: RunCli, options: list[str]) -> None:
    """Of a line speed.py reads category and, of the first choice, new_tokens, wall_time, accept_lengths and turns;
    equal.py reads turns, and compares two files line by line: the answers are in the order of the questions.
    """
    options += ["--tree-size", "8", "--lookup", "off"]  # no clock decides how many passes there are
    records = lines(run_cli([*options, "--ordered"], files=jsonl(QUESTIONS)).out)
    answers = lines(run_cli([*options, "--format", "specbench"], files=jsonl(QUESTIONS)).out)
    for question, record, answer in zip(QUESTIONS, records, answers, strict=True):
        assert answer.keys() == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
        assert (answer["question_id"], answer["category"]) == (question["question_id"], question["category"])
        (choice,) = answer["choices"]
        assert choice.keys() == {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
        num_turns = len(question["turns"])
        assert [len(choice[name]) for name in ("turns", "decoding_steps", "new_tokens", "wall_time")] == [num_turns] * 4
        assert choice["turns"] == record["turns"]
        assert sum(choice["new_tokens"]) == record["usage"]["completion_tokens"]
        assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"]) == record["spec"]["passes"]
        assert choice["accept_lengths"] == record["spec"]["accept_lengths"]
        assert sum(choice["wall_time"]) > 0  # tokens are divided by it
        assert isinstance(answer["tstamp"], float)


MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ONE_TURN = ("translation", "summarization", "qa", "math_reasoning", "rag")


def spec_bench() -> list[dict[str, Any]]:
    """A question file of Spec-Bench's shape: 480 rows from id 81 on, ten of two turns in each MT-Bench category."""
    categories = [name for name in MT_BENCH for _ in range(10)] + [name for name in ONE_TURN for _ in range(80)]
    rows: list[dict[str, Any]] = []
    for index, category in enumerate(categories):
        turns = [f"{category} {index}:\u00a0caf\u00e9"] + ([f"Again, {index}."] if category in MT_BENCH else [])
        has_reference = category not in {"writing", "roleplay", "humanities"}
        reference = {"reference": [f"answer {index}"] * len(turns)} if has_reference else {}
        rows.append({"question_id": 81 + index, "category": category, "turns": turns, **reference})
    return rows


def test_the_whole_of_spec_bench_is_answered_and_every_task_can_be_evaluated(
    run_cli: RunCli, options: list[str]
) -> None:
    """Its speed.py groups by category and divides by times and counts: none of them may be missing or nought."""
    files = {"question.jsonl": jsonl(spec_bench())["p.jsonl"]}
    small = ["-n", "2", "--tree-size", "2"]
    command = ["question.jsonl", *options[1:], *small, "--format", "specbench", "-o", "out"]
    assert "prompts: 480 rows, MT-Bench turns (560 turns)" in run_cli(command, files=files).ended().err
    answers = lines(Path("out").read_text(encoding="utf-8"))
    assert [answer["question_id"] for answer in answers] == list(range(81, 561))
    assert len({answer["answer_id"] for answer in answers}) == 480
    assert len({answer["model_id"] for answer in answers}) == 1
    for names, num_rows, num_turns in ((MT_BENCH, 80, 160), *(((name,), 80, 80) for name in ONE_TURN)):
        choices = [answer["choices"][0] for answer in answers if answer["category"] in names]
        assert len(choices) == num_rows
        assert sum(len(choice["turns"]) for choice in choices) == num_turns
        assert all(sum(choice["wall_time"]) > 0 and sum(choice["new_tokens"]) > 0 for choice in choices)
        assert all(isinstance(length, int) and length > 0 for choice in choices for length in choice["accept_lengths"])
        assert any(choice["accept_lengths"] for choice in choices)  # their mean is taken
    only = run_cli(["question.jsonl", *options[1:], "--category", "rag", "--dry-run"], files=files)
    assert "selected: 80 of 480 rows" in only.err


def test_a_failed_row_is_no_spec_bench_answer(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line with an error in place of an answer would count as one."""
    submit = Engine.submit

    def fail(self: Engine, request: TextRequest, **options: Any) -> TextHandle:
        if len(request.ids) == 4:
            raise ValueError("no")
        return submit(self, request, **options)

    monkeypatch.setattr(Engine, "submit", fail)
    outcome = run_cli([*options, "--format", "specbench"], files=jsonl(QUESTIONS)).ended(3)
    assert [answer["question_id"] for answer in lines(outcome.out)] == [81]
    batch = run_cli([*options, "--format", "openai-batch"], files=jsonl(["x = ", "def main("]))
    failed, good = lines(batch.out)
    assert (failed["response"], failed["error"]) == (
        None,
        {"code": "E_UNEXPECTED", "message": "unexpected ValueError: no"},
    )
    assert (good["error"], good["response"]["status_code"]) == (None, 200)


def test_batch_responses_are_those_of_the_endpoint_that_was_asked(run_cli: RunCli, options: list[str]) -> None:
    options = [*options, "--seed", "1", "--ordered"]
    records = lines(run_cli(options, files=jsonl(BATCH)).out)
    chat, plain = lines(run_cli([*options, "--format", "openai-batch"], files=jsonl(BATCH)).out)
    assert [chat["custom_id"], plain["custom_id"]] == ["a", "b-2"]
    for line, record in ((chat, records[0]), (plain, records[1])):
        assert line.keys() == {"id", "custom_id", "response", "error"}
        body = line["response"]["body"]
        assert body["usage"].pop("completion_tokens_details") == {"reasoning_tokens": 0}
        assert body["usage"] == {name: record["usage"][name] for name in body["usage"]}
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["system_fingerprint"] == record["config_hash"]
    assert chat["response"]["body"]["object"] == "chat.completion"
    message = {"role": "assistant", "content": records[0]["text"]}
    assert chat["response"]["body"]["choices"][0]["message"] == message
    assert plain["response"]["body"]["object"] == "text_completion"
    assert plain["response"]["body"]["choices"][0]["text"] == records[1]["text"]


def test_a_batch_has_no_place_for_turns(run_cli: RunCli, options: list[str]) -> None:
    assert "line 1 has 2 turns" in run_cli([*options, "--format", "openai-batch"], files=jsonl(QUESTIONS)).ended(2).err


@pytest.mark.parametrize(
    ("name", "rows"), [("jsonl", QUESTIONS), ("specbench", QUESTIONS), ("openai-batch", BATCH)], ids=str
)
def test_a_run_goes_on_in_each_format(name: str, rows: list[Any], run_cli: RunCli, options: list[str]) -> None:
    command = [*options, "--format", name, "-o", "out", "--repeat", "2", "--ordered"]
    assert run_cli([*command, "--overwrite"], files=jsonl(rows)).code == 0
    whole = lines(Path("out").read_text())
    assert len(whole) == 4
    Path("out").write_text("".join(json.dumps(line) + "\n" for line in whole[:3]) + '{"torn')
    outcome = run_cli([*command, "--resume"], files=jsonl(rows)).ended()
    assert "3 of 4 prompts are done, a torn last line is cut off" in outcome.err
    entries = [read_entry(name, line) for line in Path("out").read_bytes().splitlines()]
    first = [str(row.get("question_id", row.get("custom_id"))) for row in rows]
    assert [entry.id for entry in entries if entry] == [*first, *(f"{row}#2" for row in first)]
    for files, flags in ((jsonl([{**rows[0], "seed": 5}, rows[1]]), []), (jsonl(rows), ["--top-k", "3"])):
        assert "'out'" in run_cli([*command, *flags, "--resume"], files=files).ended(2).err


@settings(max_examples=150, deadline=None)
@given(
    line=st.recursive(
        st.none() | st.integers() | st.text(max_size=12) | st.sampled_from(["1-2-3", "batch_req-a-b-c"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["id", "config_hash", "error", "finish_reason", "answer_id", "choices", "turns"]), inner
            )
        ),
        max_leaves=8,
    ),
    name=st.sampled_from([name for name in FORMATS if name != "text"]),
)
def test_any_line_is_an_entry_or_none(line: Any, name: str) -> None:
    found = read_entry(name, encoded(line))
    assert found is None or isinstance(found, Entry)
