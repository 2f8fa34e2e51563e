"""`edgespec generate` with rows that say how they are to be run, in turns, in part, or not at all."""

import json
import re
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.config import SamplingSettings
from edgespec.decode.batch import Batch, first_step
from edgespec.decode.batch import Outcome as StepOutcome
from edgespec.decode.sequence import Sequence
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.model.pass_rows import PassRows
from edgespec.model.target import Target
from edgespec.pair.pair import ModelPair
from edgespec.placement.pair_setup import PairSetup, set_up
from edgespec.placement.profile_trees import tree_settings
from edgespec.placement.run_config import RunConfig
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.step import StepResult
from tests.cli.conftest import RunCli, jsonl, records
from tests.profiles.examples import example_profile
from tests.support.families import make_tokenizer

DEF, IMPORT = "def main(", "import os"
NAMES = ("sampling", "seed", "name", "max_new_tokens")  # of a request


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["-m", str(pair_folders[0]), "-md", str(pair_folders[1]), "--temp", "0"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every text was asked for, as the engine sees it."""
    seen: list[dict[str, Any]] = []
    submit = Engine.submit

    def remember(self: Engine, request: TextRequest, **options: Any) -> TextHandle:
        prompt, stop = self.pair.tokenizer.decode(request.ids), request.stop.strings
        seen.append({**{name: getattr(request, name) for name in NAMES}, "prompt": prompt, "stop": stop, **options})
        return submit(self, request, **options)

    monkeypatch.setattr(Engine, "submit", remember)
    return seen


def test_a_rows_own_settings_count_more_than_flags(
    run_cli: RunCli, options: list[str], asked: list[dict[str, Any]]
) -> None:
    own = {"temperature": 0.8, "top_k": 9, "min_p": 0.01, "seed": 7, "max_tokens": 3, "stop": ["x", "y"]}
    files = jsonl([{"prompt": DEF}, {"prompt": DEF, **own}, {"body": {"prompt": DEF, "top_p": 0.9}}])
    flags = ["-n", "4", "--seed", "1", "--top-k", "5", "--stop", "END", "--ordered"]
    found = records(run_cli(["p.jsonl", *options, *flags], files=files))
    assert [(text["sampling"], text["seed"], text["max_new_tokens"], text["stop"]) for text in asked] == [
        (SamplingSettings(temperature=0, top_k=5), 1, 4, ("END",)),
        (SamplingSettings(temperature=0.8, top_k=9, min_p=0.01), 7, 3, ("x", "y")),
        (SamplingSettings(temperature=0, top_k=5, top_p=0.9), 1, 4, ("END",)),
    ]
    expected = {"temperature": 0.8, "top_p": 1.0, "top_k": 9, "min_p": 0.01, "seed": 7}
    assert expected.items() <= found[1]["sampling"].items()
    assert (found[1]["max_new_tokens"], found[1]["stop"], len(found[1]["token_ids"])) == (3, ["x", "y"], 3)
    assert found[1]["row_settings"] == {"max_new_tokens": 3, **{k: own[k] for k in own if k != "max_tokens"}}
    assert len({record["config_hash"] for record in found}) == 1


@pytest.mark.usefixtures("no_weights_read")
def test_a_wrong_setting_of_a_row_is_named_before_weights_are_read(run_cli: RunCli, options: list[str]) -> None:
    outcome = run_cli(["p.jsonl", *options], files=jsonl([{"prompt": "a"}, {"prompt": "b", "temperature": -2}]))
    assert outcome.code == 2
    assert "Error: line 2: temperature -2 " in outcome.err


def test_stop_strings_cut_the_text_and_the_tokens_behind_them(run_cli: RunCli, options: list[str]) -> None:
    """Every substring of a greedy text, as a stop string, ends it where it begins, whatever the tree."""
    common = ["-p", DEF, *options, "-n", "40", "--format", "jsonl"]
    (whole,) = records(run_cli(common))
    for start, length, size in ((5, 1, "64"), (9, 3, "64"), (9, 3, "1"), (14, 6, "64")):
        stop = whole["text"][start : start + length]
        (cut,) = records(run_cli([*common, "--stop", "never!", "--stop", stop, "--tree-size", size]))
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        assert cut["finish_reason"] == "stop"
        count = len(cut["token_ids"])
        assert cut["token_ids"] == whole["token_ids"][:count]
        assert cut["usage"]["completion_tokens"] == count == 1 + sum(cut["spec"]["accept_lengths"])
        assert cut["stop"] == ["never!", stop]
    streamed = run_cli(["-p", DEF, *options, "-n", "40", "--stop", whole["text"][9:12]])
    assert streamed.out == whole["text"][: whole["text"].index(whole["text"][9:12])] + "\n"
    assert "stopped: stop" in streamed.err


def test_turns_are_answered_with_the_answers_before_them(
    run_cli: RunCli, options: list[str], asked: list[dict[str, Any]]
) -> None:
    files = jsonl([{"question_id": 81, "turns": [DEF, IMPORT, "x = "]}])
    (record,) = records(run_cli(["p.jsonl", *options, "-n", "6", "--seed", "3", "--format", "jsonl"], files=files))
    first, second, third = record["turns"]
    contexts = [DEF, f"{DEF}{first}\n{IMPORT}", f"{DEF}{first}\n{IMPORT}{second}\nx = "]
    assert [text["prompt"] for text in asked] == contexts
    assert [(text["seed"], text["name"]) for text in asked] == [(3, "81")] * 3  # turns stand at other positions
    assert [text["reuse"] for text in asked] == [False, True, True]  # nothing of another row
    assert [text["keeps"] for text in asked] == [True, True, False]  # and nothing for another
    assert (record["text"], record["prompt"]) == (third, [DEF, IMPORT, "x = "])
    per_turn = record["per_turn"]
    assert [turn["text"] for turn in per_turn] == record["turns"]
    assert [turn["usage"]["completion_tokens"] for turn in per_turn] == [6, 6, 6]
    for part, names in {
        "usage": ["prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "total_tokens"],
        "timings": ["prefill_s", "decode_s", "total_s"],
        "spec": ["passes", "draft_n", "draft_n_accepted", "draft_s", "verify_s"],
    }.items():
        for name in names:
            assert record[part][name] == pytest.approx(sum(turn[part][name] for turn in per_turn), abs=2e-4)
    assert record["spec"]["accept_lengths"] == [n for turn in per_turn for n in turn["spec"]["accept_lengths"]]
    assert record["token_ids"] == [token for turn in per_turn for token in turn["token_ids"]]
    # Of each turn's prompt only what is new is read: its own text, and the last token before it.
    cached = [turn["usage"]["cached_tokens"] for turn in per_turn]
    assert cached == [0, len(DEF) + 5, per_turn[1]["usage"]["prompt_tokens"] + 5]


def test_turns_are_answered_as_if_each_were_asked_alone(run_cli: RunCli, options: list[str]) -> None:
    """Greedy answers with kept keys and values equal those to the whole text as one prompt."""
    (record,) = records(run_cli(["p.json", *options, "-n", "8", "--format", "jsonl"],
                                files={"p.json": json.dumps([{"turns": [DEF, IMPORT]}])}))  # fmt: skip
    whole = f"{DEF}{record['turns'][0]}\n{IMPORT}"
    (alone,) = records(run_cli(["-p", whole, *options, "-n", "8", "--format", "jsonl"]))
    assert alone["text"] == record["turns"][1]


def test_turns_that_fill_the_context_say_so(run_cli: RunCli, options: list[str]) -> None:
    """The second answer ends where the context does; a third turn has no room, and is its row's error."""
    common = ["p.jsonl", *options, "-n", "60", "-c", "100", "--format", "jsonl"]
    (record,) = records(run_cli(common, files=jsonl([{"turns": [DEF, IMPORT]}])))
    first, second = (turn["usage"] for turn in record["per_turn"])
    assert (first["completion_tokens"], second["total_tokens"]) == (60, 100)
    assert [turn["finish_reason"] for turn in record["per_turn"]] == ["length", "context"]
    (failed,) = records(run_cli(common, files=jsonl([{"turns": [DEF, IMPORT, "x"]}])), code=3)
    assert failed["error"]["type"] == "E_CONTEXT"
    assert failed["turns"] == record["turns"]


def test_turns_stream_one_below_the_other(run_cli: RunCli, options: list[str]) -> None:
    files = jsonl([{"turns": [DEF, IMPORT]}])
    (record,) = records(run_cli(["p.jsonl", *options, "-n", "5", "--format", "jsonl"], files=files))
    shown = run_cli(["p.jsonl", *options, "-n", "5", "--format", "text"], files=files)
    assert shown.out == "\n\n".join(record["turns"]) + "\n"


def test_system_prompts_come_from_flag_file_or_row(
    run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path, asked: list[dict[str, Any]]
) -> None:
    folder = shutil.copytree(pair_folders[0], tmp_path / "target")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role[0] }}:{{ m.content }}>{% endfor %}")
    files = {**jsonl([{"prompt": "a"}, {"prompt": "b", "system": "own"}]), "s.txt": "from file\n"}
    common = ["p.jsonl", "-m", str(folder), "-n", "1", "-q"]
    for flags in (["--system", "flag"], ["--system-file", "s.txt"], []):
        assert run_cli([*common, *flags], files=files).code == 0
    own = "<s:own><u:b>"
    assert [text["prompt"] for text in asked] == ["<s:flag><u:a>", own, "<s:from file><u:a>", own, "<u:a>", own]
    assert "no.txt" in run_cli([*common, "--system-file", "no.txt"], files=files).ended(4).err


def test_prompts_come_from_flag_stdin_or_file_but_from_one(run_cli: RunCli, options: list[str]) -> None:
    for arguments, stdin in ((["-p", DEF], ""), (["-p", "-"], DEF), (["-"], DEF)):
        (record,) = records(run_cli([*arguments, *options, "-n", "2", "--format", "jsonl"], stdin=stdin))
        assert (record["prompt"], record["id"]) == (DEF, "0")
    for arguments in (["p.txt", "-p", "x"], ["p.txt", "-f", "p.txt"], [], ["-p", "x", "--lines"]):
        assert "Error: " in run_cli([*arguments, *options], files={"p.txt": "x"}).ended(2).err
    for flags in (["-p", "\udcff"], ["-p", "x", "--system", "\udcff"], ["-p", "x", "--stop", "\udcff"]):
        assert "is not UTF-8" in run_cli([*flags, *options]).err
    assert "-p has an empty prompt" in run_cli(["-p", "", *options]).err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_is_shown_how_far_a_long_prompt_is_read(
    is_terminal: bool, run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each turn, what is new in it; on a terminal in a line that is gone when the answer comes."""
    for name in ("prefill_line.AFTER_S", "prefill_line.EVERY_S", "console.QUIET_INTERVAL_S"):
        monkeypatch.setattr(f"edgespec.cli.{name}", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    alone = run_cli(["-p", "x" * 90, *options, "-n", "2"])
    assert re.search(r"prefill \d+/90 tok \d+% eta 0s", alone.err)
    assert ("\r" in alone.err) == is_terminal
    assert "prefill" not in alone.out
    files = jsonl([{"id": "a", "turns": ["x" * 90, "y" * 20]}])
    record_run = run_cli(["p.jsonl", *options, "-n", "2", "--format", "jsonl"], files=files)
    (record,) = records(record_run)
    new = [turn["usage"]["prompt_tokens"] - turn["usage"]["cached_tokens"] for turn in record["per_turn"]]
    assert new[0] == 90
    assert new[1] < 30
    if not is_terminal:
        assert all(re.search(rf"prefill \d+/{count} tok", record_run.err) for count in new)
    assert "prefill" not in run_cli(["-p", "x" * 90, *options, "-n", "2", "-q"]).err


def test_records_go_to_stdout_where_a_bar_is_drawn_on_the_terminal(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`edgespec generate p.jsonl > out.jsonl`, typed by a person."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    outcome = run_cli(["p.jsonl", *options, "-n", "2"], files=jsonl([{"prompt": DEF}, {"prompt": IMPORT}]))
    assert [record["prompt"] for record in records(outcome)] == [DEF, IMPORT]
    assert "completion_tokens" not in outcome.err


def test_rows_are_selected_and_repeated(run_cli: RunCli, options: list[str], asked: list[dict[str, Any]]) -> None:
    files = jsonl({"id": f"r{index}", "prompt": f"a{index}", "category": "ab"[index % 2]} for index in range(6))
    common = ["p.jsonl", *options, "-n", "1", "--seed", "4", "--ordered"]

    def ids(*flags: str) -> list[str]:
        return [record["id"] for record in records(run_cli([*common, "--format", "jsonl", *flags], files=files))]

    assert ids("--start", "2", "--limit", "2") == ["r2", "r3"]
    assert ids("--only", "r5,r1") == ["r1", "r5"]
    assert ids("--category", "b", "--start", "1") == ["r3", "r5"]
    asked.clear()
    assert ids("--limit", "2", "--repeat", "2") == ["r0", "r1", "r0#2", "r1#2"]
    assert [(text["seed"], text["name"]) for text in asked] == [(4, "r0"), (4, "r1"), (4, "r0#2"), (4, "r1#2")]
    assert "'r7'" in run_cli([*common, "--only", "r7"], files=files).ended(2).err
    assert "selected: 2 of 6 rows" in run_cli([*common, "--limit", "2"], files=files).err


def test_a_rows_text_depends_on_its_id_and_not_on_its_place_or_its_trees(run_cli: RunCli, options: list[str]) -> None:
    rows = [{"id": f"r{index}", "prompt": DEF} for index in range(3)]
    common = ["p.jsonl", *options, "-n", "8", "--seed", "4", "--temp", "0.9", "--format", "jsonl"]

    def texts(files: dict[str, str], *flags: str) -> dict[str, list[int]]:
        return {record["id"]: record["token_ids"] for record in records(run_cli([*common, *flags], files=files))}

    all_rows = texts(jsonl(rows))
    assert len({tuple(text) for text in all_rows.values()}) == 3
    assert texts(jsonl([*rows[::-1]])) == all_rows
    assert texts(jsonl(rows), "--only", "r1") == {"r1": all_rows["r1"]}
    assert texts(jsonl(rows), "--policy", "none") == all_rows
    repeated = texts(jsonl(rows), "--repeat", "2")
    assert len({tuple(text) for text in repeated.values()}) == 6
    assert all_rows.items() <= repeated.items()


@pytest.mark.usefixtures("no_weights_read")
def test_a_dry_run_checks_and_plans_and_touches_nothing(
    run_cli: RunCli, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = jsonl([{"turns": [DEF, IMPORT]}, {"prompt": "a", "max_new_tokens": 8}])
    common = ["p.jsonl", *options, "-n", "50", "--dry-run"]
    outcome = run_cli([*common, "-o", str(tmp_path / "out.jsonl")], files=files).ended()
    assert outcome.out == ""
    assert not (tmp_path / "out.jsonl").exists()
    for part in ("keys and values", "2 prompts, 3 answers, at most 108 new tokens", "edgespec profile", "nothing was"):
        assert part in outcome.err
    mixed = jsonl([{"prompt": "a"}, {"turns": ["x" * 200, "y" * 60]}])
    skipped = run_cli(common, files=mixed).err
    assert "skipped: line 2 " in skipped
    assert "to do: 1 prompt, 1 answer, at most 50 new tokens" in skipped
    too_long = run_cli([*common, "--truncate", "fail"], files=mixed).ended(2)
    assert "line 2: with all 2 turns, the prompt has 26" in too_long.err

    profile = example_profile()
    plan = profile.plans[0]

    def follow_plan(pair: ModelPair, run_config: RunConfig, *_: Any, **__: Any) -> PairSetup:
        return replace(set_up(pair, run_config, tree_settings(plan.best)), profile=profile, plan=plan)

    monkeypatch.setattr("edgespec.placement.pair_setup.set_up_by_profile", follow_plan)
    planned = run_cli(common, files=files).err
    # 108 tokens at the plan's four a second, and what the profile's passes take to read the prompts.
    assert f"s by profile {profile.name} if no answer ends early" in planned
    seconds = int(planned.partition("about ")[2].split(" ")[0])
    assert 108 / plan.best.tokens_per_s <= seconds <= 108 / plan.best.tokens_per_s + 10


def fail_on(monkeypatch: pytest.MonkeyPatch, prompt: str, error: Exception) -> None:
    """A text whose prompt ends so fails when that is read, alone."""

    def fail(sequence: Sequence, started: float) -> StepResult:
        if make_tokenizer().decode(sequence.prompt).endswith(prompt):
            raise error
        return first_step(sequence, started)

    monkeypatch.setattr("edgespec.decode.batch.first_step", fail)


def fail_passes_of(monkeypatch: pytest.MonkeyPatch, prompt: str, error: Exception) -> None:
    """Passes fail where a text whose prompt ends so takes part."""
    step = Batch.step

    def fail(self: Batch) -> list[StepOutcome]:
        if any(make_tokenizer().decode(sequence.prompt).endswith(prompt) for sequence in self.sequences):
            raise error
        return step(self)

    monkeypatch.setattr(Batch, "step", fail)


def test_a_pass_without_memory_is_made_again_with_a_smaller_tree_and_said(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree_rows = Target.tree_rows

    def limited(self: Target, tree: TokenTree) -> PassRows:
        if tree.num_nodes > 1:
            raise torch.OutOfMemoryError("no more")
        return tree_rows(self, tree)

    files = jsonl([{"prompt": "a"}, {"prompt": "b"}])
    expected = records(run_cli(["p.jsonl", *options, "-n", "12", "--ordered"], files=files))
    monkeypatch.setattr(Target, "tree_rows", limited)
    outcome = run_cli(["p.jsonl", *options, "-n", "12", "--ordered"], files=files)
    assert [record["text"] for record in records(outcome)] == [record["text"] for record in expected]
    assert outcome.err.count("memory ran out in a pass: no tree from here on") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EdgespecError("E_READ_FAILED", "reading weights failed.", "Restore the file."), "E_READ_FAILED"),
        (torch.OutOfMemoryError("no more"), "E_MEMORY"),
        (MemoryError(), "E_MEMORY"),
        (IndexError("off by one"), "E_UNEXPECTED"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_fails_in_one_prompt_is_its_record_and_the_next_one_runs(
    error: Exception, code: str, run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(monkeypatch, "bad", error)
    files = jsonl([{"prompt": "a"}, {"turns": [DEF, "bad"]}, {"prompt": "c"}])
    outcome = run_cli(["p.jsonl", *options, "-n", "2", "--ordered"], files=files)
    first, failed, last = records(outcome, code=3)
    assert (first["error"], last["error"]) == (None, None)
    assert (failed["error"]["type"], failed["finish_reason"], failed["text"]) == (code, "error", None)
    assert len(failed["turns"]) == 1  # the one that was answered
    assert "line 2: " in outcome.err
    assert "1 failed" in outcome.err


@pytest.mark.parametrize(
    ("parallel", "failed_ids"), [("1", ["bad"]), ("4", ["a", "bad", "c", "d"])], ids=["alone", "together"]
)
def test_a_pass_that_fails_ends_the_texts_that_share_it_and_later_ones_run(
    parallel: str, failed_ids: list[str], run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_passes_of(monkeypatch, "bad", EdgespecError("E_READ_FAILED", "reading weights failed.", "Restore the file."))
    rows = [{"id": name, "prompt": name} for name in ("a", "bad", "c", "d", "e")]
    outcome = run_cli(["p.jsonl", *options, "-n", "2", "-np", parallel, "--ordered"], files=jsonl(rows))
    found = records(outcome, code=3)
    assert [record["id"] for record in found] == ["a", "bad", "c", "d", "e"]
    assert [record["id"] for record in found if record["error"]] == failed_ids
    assert {record["error"]["type"] for record in found if record["error"]} == {"E_READ_FAILED"}
    assert f"{len(failed_ids)} failed" in outcome.err


def test_a_text_that_memory_never_suffices_for_fails_alone(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees become smaller, then fewer texts are under way, until each is alone."""
    rows = [{"id": name, "prompt": name} for name in ("a", "bad", "c", "d")]
    common = ["p.jsonl", *options, "-n", "6", "-np", "4", "--ordered"]
    expected = records(run_cli(common, files=jsonl(rows)))
    fail_passes_of(monkeypatch, "bad", torch.OutOfMemoryError("no more"))
    found = records(run_cli(common, files=jsonl(rows)), code=3)
    assert [record["error"] and record["error"]["type"] for record in found] == [None, "E_MEMORY", None, None]
    texts = [[record["token_ids"] for record in whole if record["id"] != "bad"] for whole in (found, expected)]
    assert texts[0] == texts[1]


def test_a_record_names_settings_as_the_command_line_does(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(monkeypatch, "bad", EdgespecError("E_NAN_LOGITS", "`dtype=float16` is NaN.", "Try `dtype=float32`."))
    outcome = run_cli(["p.jsonl", *options, "-n", "2", "--ordered"], files=jsonl(["bad", "c"]))
    failed, _ = records(outcome, code=3)
    assert (failed["error"]["message"], failed["error"]["fix"]) == ("--dtype float16 is NaN.", "Try --dtype float32.")
    assert "--dtype float16 is NaN.\nTry: Try --dtype float32." in outcome.err


def test_fail_fast_ends_the_run_behind_the_failed_record(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(monkeypatch, "bad", EdgespecError("E_NAN_LOGITS", "NaN.", "Download again."))
    outcome = run_cli(["p.jsonl", *options, "-n", "2", "-np", "1", "--fail-fast"], files=jsonl(["a", "bad", "c"]))
    found = records(outcome, code=1)
    assert [record["finish_reason"] for record in found] == ["length", "error"]
    assert "stopped by --fail-fast with 2 of 3 records written" in outcome.err


@pytest.mark.parametrize(("presses", "seed"), [(1, ["--seed", "7"]), (2, ["--seed=7"]), (3, [])])
def test_an_interrupt_ends_the_run_with_whole_records_and_the_way_to_go_on(
    presses: int, seed: list[str], run_cli: RunCli, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second text, once or more: the handler asks the engine to stop, the third raises at once."""
    take, calls = TextHandle.take, []

    def press(self: TextHandle, step: StepResult) -> None:
        take(self, step)
        if self.request.name == "1":
            calls.append(1)
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextHandle, "take", press)
    monkeypatch.setattr("sys.argv", ["edgespec", "generate", "p.jsonl", *seed, "-o", "the out.jsonl", "--overwrite"])
    out = tmp_path / "out.jsonl"
    command = ["p.jsonl", *options, *seed, "-n", "24", "-np", "1", "-o", str(out)]
    before = signal.getsignal(signal.SIGINT)
    outcome = run_cli(command, files=jsonl(["a", "b", "c"])).ended(130)
    assert len(calls) == 1  # no pass after the one that was under way
    assert signal.getsignal(signal.SIGINT) is before
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["0"]
    assert "1 of 3 records" in outcome.err
    (first,) = map(json.loads, out.read_text().splitlines())
    drawn = ["--seed", str(first["sampling"]["seed"])]
    words = shlex.join([*seed, "-o", "the out.jsonl", "--resume", *([] if seed else drawn)])
    assert f"to go on: edgespec generate p.jsonl {words}\n" in outcome.err
    monkeypatch.setattr(TextHandle, "take", take)
    assert run_cli([*command, "--resume"], files=jsonl(["a", "b", "c"])).code == 0
    assert sorted(json.loads(line)["id"] for line in out.read_text().splitlines()) == ["0", "1", "2"]


def test_many_prompts_are_records_where_piped_and_text_where_asked(run_cli: RunCli, options: list[str]) -> None:
    common = ["p.jsonl", *options, "-n", "4"]
    found = records(run_cli([*common, "--ordered"], files=jsonl([DEF, IMPORT])))
    outcome = run_cli([*common, "--format", "text"], files=jsonl([DEF, IMPORT]))
    assert outcome.out == "".join(record["text"] + "\n" for record in found)
    assert "[2/2] id=1" in outcome.err
    assert run_cli([*common, "--format", "text", "-o", "t.txt"], files=jsonl([DEF, IMPORT])).out == ""
    assert Path("t.txt").read_text() == "".join(record["text"] + "\n\n" for record in found)


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("name", ["p.jsonl", "p.ndjson", "p.json"])
def test_rows_become_records_however_many_there_are(
    name: str, num_rows: int, is_terminal: bool, run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    rows = [{"prompt": prompt} for prompt in (DEF, IMPORT)][:num_rows]
    content = json.dumps(rows) if name == "p.json" else jsonl(rows)["p.jsonl"]
    found = records(run_cli([name, *options, "-n", "2"], files={name: content}))
    assert sorted(record["prompt"] for record in found) == sorted(row["prompt"] for row in rows)


def test_many_texts_are_shown_on_a_terminal(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    outcome = run_cli(["p.txt", "--lines", *options, "-n", "4"], files={"p.txt": f"{DEF}\n{IMPORT}\n"}).ended()
    assert not outcome.out.startswith("{")
    assert "[1/2] id=0\n[2/2] id=1\n" in outcome.err


def test_what_was_read_and_is_not_applied_is_said(run_cli: RunCli, options: list[str]) -> None:
    rows = [{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"}], "model": "m", "n": 2}}]
    outcome = run_cli(["p.jsonl", *options, "-n", "1"], files=jsonl(rows))
    assert "prompts: 1 row, OpenAI batch messages" in outcome.err
    assert "handed through to the records: model (1 row), n (1 row)" in outcome.err
    assert "no chat template" in outcome.err
