"""A run spread over workers writes what one process writes, and refuses by one error what it cannot do.

The workers run in this process, in the place of Ray's: `test_ray.py` starts Ray itself where it is installed.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.generate import command, over_workers
from edgespec.cli.generate.batched import RowAnswers
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.worker import RowPlan, RowWorker
from edgespec.errors import EdgespecError
from edgespec.estimate import choice
from edgespec.text.handle import TextHandle
from tests.cli.conftest import Outcome, RunCli, jsonl, written
from tests.edgespec.distributed.stand_ins import Dies, InlinePool

ROWS: list[dict[str, Any]] = [
    {"id": "greedy", "prompt": "def main("},
    {"id": "hot", "prompt": "def main(", "temperature": 0.9, "seed": 5},
    {"id": "turns", "turns": ["def f(", "import re", "x = "], "temperature": 0.7, "top_k": 20},
    {"id": "short", "prompt": "x = ", "max_new_tokens": 3, "category": "c"},
    {"id": "too long", "prompt": "y" * 400},
    *({"id": f"r{n}", "prompt": f"import {'abc'[n % 3]}{n}", "temperature": 0.8} for n in range(9)),
]
# All of a record but what the clock or the other texts of a pass decide
OWN_TO_A_RUN = {"timings", "spec", "memory", "created", "per_turn"}


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> list[InlinePool]:
    """The crews of all runs, whose workers are in this process."""
    return spread_inline(monkeypatch)


def spread_inline(
    monkeypatch: pytest.MonkeyPatch,
    *,
    dies: Dies = lambda _name, _jobs: False,
    opened: Callable[[RowPlan], RowPlan] = lambda plan: plan,
) -> list[InlinePool]:
    crews: list[InlinePool] = []

    def pool(plan: RowPlan, *, num_workers: int, resources: dict[str, float], check: Callable[[], None]) -> InlinePool:
        sent = opened(pickle.loads(pickle.dumps(plan)))  # as it goes over the network
        crews.append(InlinePool(sent, [f"worker {n}" for n in range(1, num_workers + 1)], dies=dies))
        return crews[-1]

    @contextmanager
    def connected(_address: str, **_options: Any) -> Iterator[None]:
        yield None

    monkeypatch.setattr(over_workers, "RayWorkerPool", pool)
    monkeypatch.setattr(over_workers, "connected", connected)
    monkeypatch.setattr(over_workers, "machines", lambda _ray: [{"CPU": 4.0}])
    monkeypatch.setattr(command, "import_ray", lambda: None)
    return crews


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    models = ["-m", str(pair_folders[0]), "-md", str(pair_folders[1])]
    return ["p.jsonl", *models, "--temp", "0", "-n", "8", "--seed", "3", "--dtype", "float32", "-o", "out.jsonl"]


def kept(outcome: Outcome) -> list[dict[str, Any]]:
    """The records of a run in which some prompts may have failed."""
    assert outcome.code in (0, 3), outcome.err
    return written()


def compared(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {record["id"]: {name: record[name] for name in record.keys() - OWN_TO_A_RUN} for record in records}
    for record in found.values():
        record["usage"] = {**(record["usage"] or {}), "cached_tokens": None}  # rows stay where others leave room
    assert len(found) == len(records)
    return found


def one_process(run_cli: RunCli, options: list[str]) -> dict[str, dict[str, Any]]:
    return compared(kept(run_cli([*options, "--overwrite"], files=jsonl(ROWS))))


def test_each_worker_takes_the_draft_that_pays_for_its_share_of_the_rows(
    run_cli: RunCli, pair_folders: tuple[Path, Path], crews: list[InlinePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that sends the rows chooses none."""
    asked = []

    def best(found: list[choice.ReckonedDraft]) -> choice.ReckonedDraft:
        asked.append([one.pair.run_config.num_texts for one in found])
        return found[-1]

    monkeypatch.setattr(choice, "best_of", best)
    models = ["-m", str(pair_folders[0]), "-md", f"none,{pair_folders[1]}"]
    arguments = ["p.jsonl", *models, "-n", "4", "-np", "8", "-o", "out.jsonl", "--ray", "--workers", "2"]
    found = kept(run_cli(arguments, files=jsonl([{"prompt": "ab"}] * 6)))
    assert asked == [[3, 3]] * 2
    assert {record["draft_model"] for record in found} == {str(pair_folders[1])}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_records_are_those_of_one_process(
    num_workers: int, run_cli: RunCli, options: list[str], crews: list[InlinePool]
) -> None:
    """In float32 token for token, and with the hash of the same settings, so that either goes on with the other's."""
    expected = one_process(run_cli, options)
    outcome = run_cli([*options, "--overwrite", "--ray", "--workers", str(num_workers)])
    assert outcome.code == 3  # of the prompt that is too long
    assert compared(kept(outcome)) == expected
    assert crews[0].is_closed
    assert {worker for worker, jobs in crews[0].given if jobs} == {f"worker {n}" for n in range(1, num_workers + 1)}
    assert "14 prompts · " in outcome.err
    assert "line 5: " in outcome.err


def test_each_form_of_output_is_the_same(run_cli: RunCli, options: list[str], crews: list[InlinePool]) -> None:
    one_process(run_cli, [*options, "--ordered"])
    ids = [record["id"] for record in written()]
    outcome = run_cli([*options, "--ordered", "--overwrite", "--ray", "--workers", "2"])
    assert [record["id"] for record in kept(outcome)] == ids == [row["id"] for row in ROWS]
    assert not Path("out.jsonl.waiting").exists()


def test_a_run_goes_on_where_another_ended(run_cli: RunCli, options: list[str], crews: list[InlinePool]) -> None:
    """Whether one process wrote the beginning, or workers did; settings that differ are refused as ever."""
    expected = one_process(run_cli, options)
    lines = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:40])
    outcome = run_cli([*options, "--resume", "--ray", "--workers", "2"])
    assert compared(kept(outcome)) == expected
    assert "resuming 'out.jsonl'" in outcome.err
    other = run_cli([*options, "--resume", "--ray", "--workers", "2", "--top-k", "3"]).ended(2)
    assert "top_k 0 there, 3 here" in other.err


@pytest.mark.parametrize("bad", ["hot", "r3"])
def test_a_row_that_ends_workers_has_an_error_of_its_own(
    bad: str, run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_process(run_cli, options)
    spread_inline(monkeypatch, dies=lambda _name, jobs: any(job.row.id == bad for job in jobs))
    outcome = run_cli([*options, "--overwrite", "--ray", "--workers", "3"])
    found = compared(kept(outcome))
    record = found.pop(bad)
    assert record["error"]["type"] == "E_WORKER"
    assert "3 workers were lost while this row ran" in record["error"]["message"]
    assert record.keys() == expected.pop(bad).keys()
    assert found == expected
    assert "is lost (its process ended); rows that go back to the queue: " in outcome.err


def test_a_row_that_fails_everywhere_has_one_record(
    run_cli: RunCli, options: list[str], crews: list[InlinePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried by three workers; what no worker can do better, a prompt that is too long, by one."""
    begin = RowAnswers.next_turn

    def next_turn(row: RowAnswers) -> TextHandle:
        if row.request.row.id == "hot":
            raise EdgespecError("E_NAN_LOGITS", "no numbers.", "Other weights.")
        return begin(row)

    monkeypatch.setattr(RowAnswers, "next_turn", next_turn)
    outcome = run_cli([*options, "--ray", "--workers", "3", "--only", "hot,short,too long"], files=jsonl(ROWS))
    found = {record["id"]: record["error"] for record in kept(outcome)}
    assert {name: error and error["type"] for name, error in found.items()} == {
        "hot": "E_NAN_LOGITS", "short": None, "too long": "E_CONTEXT",
    }  # fmt: skip
    jobs = [job.row.id for _, given in crews[0].given for job in given]
    assert {name: jobs.count(name) for name in found} == {"hot": 3, "short": 1, "too long": 1}


def test_a_worker_with_other_weights_is_refused_before_any_is_read(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch, pair_folders: tuple[Path, Path]
) -> None:
    made: list[RowPlan] = []

    class Unlike:
        def open(self, *, num_beside: int) -> RowWorker:
            """Every second worker has the draft in the place of the target."""
            plan = made[0]
            made.append(plan)
            if len(made) % 2:
                models = replace(plan.pair_options.models, target=pair_folders[1])
                plan = replace(plan, pair_options=replace(plan.pair_options, models=models))
            return plan.open(num_beside=num_beside)

    def opened(plan: RowPlan) -> Any:
        made.append(plan)
        return Unlike()

    spread_inline(monkeypatch, opened=opened)
    monkeypatch.setattr("edgespec.engine.load_models", lambda *_a, **_k: pytest.fail("weights are read"))
    outcome = run_cli([*options, "--ray", "--workers", "2"], files=jsonl(ROWS)).ended(1)
    assert outcome.err.count("Error: ") == 1
    assert "worker 2 would not write what worker 1 writes: target " in outcome.err
    assert not Path("out.jsonl").exists()


def test_a_dry_run_loads_and_writes_nothing(
    run_cli: RunCli, options: list[str], crews: list[InlinePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.engine.load_models", lambda *_a, **_k: pytest.fail("weights are read"))
    outcome = run_cli([*options, "--ray", "--workers", "2", "--dry-run"], files=jsonl(ROWS)).ended()
    assert "worker 1 and 1 more: target: " in outcome.err
    assert "to do: 13 prompts, 15 answers, at most " in outcome.err
    assert not Path("out.jsonl").exists()


def test_ctrl_c_keeps_what_is_written_and_says_how_to_go_on(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_process(run_cli, options)

    def dies(_name: str, jobs: Sequence[Request]) -> bool:
        if any(job.row.id == "r5" for job in jobs):  # it is handed out when others have ended
            raise KeyboardInterrupt
        return False

    crews = spread_inline(monkeypatch, dies=dies)
    outcome = run_cli([*options, "--overwrite", "--ray", "--workers", "2", "-np", "2"]).ended(130)
    assert "to go on: edgespec " in outcome.err
    assert crews[0].is_closed
    part = compared(written())
    assert 0 < len(part) < len(expected)
    spread_inline(monkeypatch)
    assert compared(kept(run_cli([*options, "--resume", "--ray"]))) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "2"], "--workers and --resources belong to --ray"),
        (["--ray", "--workers", "0"], "0 is not in the range x>=1"),
        (["--ray", "--resources", "cpu"], "--resources cpu: 'cpu' is no amount"),
        (["--ray", "--stream"], "--stream shows one text after the other"),
        (["--ray", "--prompt-cache", "c"], "--prompt-cache is a file of one process"),
        (["--ray", "--workers", "5"], "--workers 5, each with 1 CPU: the cluster has room for 4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_before_anything_is_read(
    arguments: list[str], said: str, run_cli: RunCli, options: list[str], crews: list[InlinePool]
) -> None:
    outcome = run_cli([*options, *arguments], files=jsonl(ROWS)).ended(2)
    assert outcome.err.count("Error: ") == 1
    assert said in outcome.err
    assert not crews


def test_records_go_to_a_file(run_cli: RunCli, crews: list[InlinePool]) -> None:
    outcome = run_cli(["p.jsonl", "--ray"], files=jsonl(ROWS)).ended(2)
    assert "--ray writes its records to a file: give -o FILE." in outcome.err


def test_without_ray_the_extra_is_named(run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    outcome = run_cli([*options, "--ray"], files=jsonl(ROWS)).ended(2)
    assert outcome.err.splitlines()[-2].startswith("Error: Ray is not installed here")
    assert outcome.err.splitlines()[-1] == "Try: Install it: pip install 'edgespec[ray]'."
