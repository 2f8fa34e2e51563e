"""Prompts that are under way together: the same texts, in fewer passes, written as they end or in the file's order."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine import Engine
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows
from edgespec.placement.pair_setup import PairSetup
from edgespec.text.handle import TextHandle
from edgespec.tuning.step import StepResult
from tests.cli.conftest import RunCli, jsonl, records, written

MIXED = [
    {"id": "greedy", "prompt": "def main("},
    {"id": "hot", "prompt": "def main(", "temperature": 0.9, "seed": 5},
    {"id": "stop", "prompt": "import os", "temperature": 1.0, "stop": ["a", "e", "i", "X", "x"]},
    {"id": "turns", "turns": ["def f(", "import re", "x = "], "temperature": 0.7, "top_k": 20},
    {"id": "short", "prompt": "x = ", "max_new_tokens": 3},
    {"id": "long", "prompt": "y" * 60, "temperature": 0.8, "top_p": 0.9},
]
# Without a tree all texts gain one token a pass, and so it is known when each ends
LENGTHS = [{"id": f"n{count}", "prompt": "def main(", "max_new_tokens": count} for count in (12, 2, 6, 4)]
SAME = ("token_ids", "text", "turns", "finish_reason", "sampling", "stop", "config_hash")


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["p.jsonl", "-m", str(pair_folders[0]), "-md", str(pair_folders[1]), "--temp", "0", "--seed", "3"]


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [record["id"] for record in found]


def texts(found: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {record["id"]: [record[name] for name in SAME] for record in found}


@pytest.mark.parametrize("trees", [[], ["--tree-size", "8"], ["--policy", "none"]], ids=["tuned", "fixed", "none"])
def test_texts_that_share_passes_are_those_that_run_alone(
    trees: list[str], run_cli: RunCli, options: list[str]
) -> None:
    command = [*options, *trees, "-n", "12", "--repeat", "2", "--format", "jsonl"]
    alone = records(run_cli([*command, "-np", "1"], files=jsonl(MIXED)))
    together = records(run_cli([*command, "-np", "4"], files=jsonl(MIXED)))
    assert len(together) == len(alone) == 2 * len(MIXED)
    assert texts(together) == texts(alone)
    assert {record["finish_reason"] for record in alone} == {"length", "stop"}
    assert {record["spec"]["mean_texts"] for record in alone} == {1.0}
    assert max(record["spec"]["mean_texts"] for record in together) > 2


def test_a_record_says_how_many_texts_its_passes_had(run_cli: RunCli, options: list[str]) -> None:
    rows = [{"prompt": "def main("}] * 4
    for parallel in (1, 2, 4):
        command = [*options, "-n", "6", "--policy", "none", "-np", str(parallel)]
        found = records(run_cli(command, files=jsonl(rows)))
        assert [record["spec"]["mean_texts"] for record in found] == [parallel] * 4


def test_records_come_as_texts_end_or_in_the_files_order(run_cli: RunCli, options: list[str]) -> None:
    common = [*options, "--policy", "none", "-np", "3"]
    # n4 begins when n2 has ended.
    assert ids(records(run_cli(common, files=jsonl(LENGTHS)))) == ["n2", "n6", "n4", "n12"]
    assert ids(records(run_cli([*common, "--ordered"], files=jsonl(LENGTHS)))) == ["n12", "n2", "n6", "n4"]
    assert ids(records(run_cli([*common[:-1], "1"], files=jsonl(LENGTHS)))) == ["n12", "n2", "n6", "n4"]


def test_texts_without_ids_are_always_in_the_files_order(run_cli: RunCli, options: list[str]) -> None:
    common = [*options, "--policy", "none", "-np", "3"]
    found = records(run_cli([*common, "--ordered"], files=jsonl(LENGTHS)))
    assert run_cli([*common, "--format", "text", "-o", "out.txt"], files=jsonl(LENGTHS)).code == 0
    assert Path("out.txt").read_text(encoding="utf-8") == "".join(record["text"] + "\n\n" for record in found)


@pytest.mark.parametrize("order", [[], ["--ordered"]], ids=["as they end", "ordered"])
@pytest.mark.parametrize("parallel", ["1", "4"])
def test_a_run_goes_on_however_many_texts_are_under_way(
    order: list[str], parallel: str, run_cli: RunCli, options: list[str]
) -> None:
    """What is on the disk was written by four at a time; its last line may be torn."""
    command = [*options, "-n", "8", "-o", "out.jsonl", *order]
    assert run_cli([*command, "-np", "4", "--overwrite"], files=jsonl(MIXED)).code == 0
    whole = written("out.jsonl")
    lines = Path("out.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for left in (lines[:2], [*lines[:2], lines[2][:40]]):
        Path("out.jsonl").write_text("".join(left), encoding="utf-8")
        outcome = run_cli([*command, "-np", parallel, "--resume"], files=jsonl(MIXED)).ended()
        assert "2 of 6 prompts are done" in outcome.err
        assert ("a torn last line is cut off" in outcome.err) == (len(left) == 3)
        found = written("out.jsonl")
        assert len(found) == len(MIXED)
        assert texts(found) == texts(whole)
        assert not order or ids(found) == [row["id"] for row in MIXED]


def test_an_interrupt_keeps_every_text_that_ended_with_the_pass(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another row has its next turn to come, and where texts of that very pass are not written yet."""
    rows = [
        {"id": "turns", "turns": ["def f(", "import re"], "max_new_tokens": 3},
        *({"id": name, "prompt": "def main(", "max_new_tokens": 3} for name in ("a", "b")),
        *({"id": name, "prompt": "def main(", "max_new_tokens": 12} for name in ("c", "d", "e")),
    ]
    command = [*options, "--policy", "none", "-np", "5", "-o", "out.jsonl"]
    assert run_cli(command, files=jsonl(rows)).code == 0
    whole = texts(written("out.jsonl"))
    take, steps = TextHandle.take, list[str]()

    def press(self: TextHandle, step: StepResult) -> None:
        take(self, step)
        steps.append(self.request.name)
        if self.request.name == "a" and self.is_done:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextHandle, "take", press)
    monkeypatch.setattr("sys.argv", ["edgespec", "generate", "p.jsonl", "-o", "out.jsonl", "--overwrite"])
    outcome = run_cli([*command, "--overwrite"], files=jsonl(rows)).ended(130)
    assert sorted(ids(written("out.jsonl"))) == ["a", "b"]
    assert "stopped with 2 of 6 records written\n" in outcome.err
    assert "to go on: edgespec generate p.jsonl -o out.jsonl --resume" in outcome.err
    assert {name: steps.count(name) for name in steps} == dict.fromkeys(["turns", "a", "b", "c", "d"], 3)
    monkeypatch.setattr(TextHandle, "take", take)
    assert run_cli([*command, "--resume"], files=jsonl(rows)).code == 0
    assert texts(written("out.jsonl")) == whole


def test_progress_says_how_many_are_under_way(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.cli.console.QUIET_INTERVAL_S", 0.0)
    shown = run_cli([*options, "--policy", "none", "-np", "3"], files=jsonl(LENGTHS)).err
    assert re.search(
        r"^0 of 4 prompts · at most \d+ s left · \d+\.\d tok/s · 3 under way · 3 tokens$", shown, re.MULTILINE
    )
    assert re.search(r"^3 of 4 prompts · \d+ s left · \d+\.\d tok/s · 1 under way · \d+ tokens$", shown, re.MULTILINE)


def test_it_is_shown_how_far_prompts_are_read_together(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prefill_line.AFTER_S", "console.QUIET_INTERVAL_S"):
        monkeypatch.setattr(f"edgespec.cli.{name}", 0.0)
    rows = [{"prompt": "x" * 90}, {"prompt": "y" * 60}, {"prompt": "z" * 70, "max_new_tokens": 2}]
    shown = run_cli([*options, "-n", "2", "-np", "2"], files=jsonl(rows)).err
    assert re.search(r"prefill \d+/150 tok \d+% eta 0s", shown)
    assert re.search(r"prefill \d+/70 tok", shown)  # of those before nothing is left to read


def test_texts_that_are_shown_come_one_after_the_other_and_have_all_memory(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    build = Engine.__init__

    def remember(self: Engine, setup: PairSetup, **more: Any) -> None:
        seen.append(setup.run_config.num_texts)
        build(self, setup, **more)

    monkeypatch.setattr(Engine, "__init__", remember)
    for flags in (["--format", "jsonl"], ["--format", "jsonl", "--stream"], ["--format", "text"]):
        assert run_cli([*options, "-n", "2", *flags], files=jsonl(MIXED)).code == 0
    assert seen[0] > 1
    assert seen[1:] == [1, 1]


def test_fewer_texts_are_said_once_where_memory_runs_out(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of more than one text do not fit: three become two, then one, and no text is lost."""
    read = CausalModel._run

    def limited(self: CausalModel, parts: list[PassRows], chunks: object) -> object:
        if len(parts) > 1:
            raise MemoryError
        return read(self, parts, chunks)

    command = [*options, "--policy", "none", "-np", "3"]
    whole = texts(records(run_cli(command, files=jsonl(LENGTHS))))
    monkeypatch.setattr(CausalModel, "_run", limited)
    outcome = run_cli(command, files=jsonl(LENGTHS))
    assert texts(records(outcome)) == whole
    assert outcome.err.count("memory ran out") == 1
    assert "at most 2 texts under way from here on, no longer 3" in outcome.err
