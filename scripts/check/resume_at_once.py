"""Start two, three and four `edgespec generate -o FILE --resume` at once: is every prompt there exactly once?

    python -m scripts.check.resume_at_once

A round begins with no file, with that of a run that was killed, or with a run that is under way, most often near its
end. Then 2 to 4 runs resume the file within --spread seconds. Each of them is done, or says that another run is
writing; a last run goes on alone. The round passes when every id is there once, every line is whole, and every text is
that of an uninterrupted run (temperature 0). In every other round those that resume are --ordered, and so replace a
file whose records are in another order. Runs are children of one process that has imported everything, so that they
begin within milliseconds of each other; that needs fork. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import edgespec.engine  # noqa: F401  # before the first fork
from edgespec.cli import run
from scripts.check.resume import Counts, judge, tear
from tests.support.runs import POLL_S, num_lines

TAKEN = "another run is writing"
BEGINNINGS = ("nothing", "killed", "under way", "ending", "ending", "ending")


@dataclass
class AtOnce:
    """What happened in all rounds."""

    records: Counts = field(default_factory=Counts)
    ended: Counter[str] = field(default_factory=Counter)  # of runs that resumed: done, refused, failed
    rounds_of: Counter[str] = field(default_factory=Counter)  # by the number of runs, and by how they began

    @property
    def passed(self) -> bool:
        """Nothing lost, doubled, torn or different, and no run failed."""
        return self.records.passed and not self.ended["failed"]


@dataclass(frozen=True)
class Child:
    """A run in a process of its own."""

    pid: int
    messages: Path

    def wait(self) -> int:
        """Return its exit status; below 0 the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


@dataclass(frozen=True)
class Task:
    """What all runs of the rounds are to do."""

    folder: Path
    prompts: Path
    num_prompts: int
    expected: dict[str, list[str]]

    def start(self, out: Path, number: int, *flags: str) -> Child:
        """Start a run; with --resume it is one of several."""
        messages = self.folder / f"messages-{number}"
        arguments = ["generate", str(self.prompts), "-o", str(out), "--temp", "0", *flags]
        pid = os.fork()
        if pid:
            return Child(pid, messages)
        status = 1
        try:
            file = os.open(messages, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            status = run(arguments)
            sys.stderr.flush()
        finally:
            os._exit(status)


def write_prompts(path: Path, count: int) -> None:
    """Prompts whose answers have different lengths, so that they end in another order."""
    rows = [
        {"id": f"p{index}", "prompt": f"def function_{index}(", "max_new_tokens": 4 + 7 * (index * 5 % count)}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def round_of(task: Task, out: Path, counts: AtOnce, chance: random.Random, *, number: int, spread_s: float) -> None:
    """One file: how it began, the runs at once, and the last one."""
    ordered = ["--ordered"] if number % 2 else []
    how, num_runs = chance.choice(BEGINNINGS), 2 + number % 3
    counts.rounds_of.update([f"{num_runs} runs", how])
    first = None
    if how != "nothing":
        first = task.start(out, 0)
        at = chance.randrange(task.num_prompts)
        _wait_for(first, out, num_records=task.num_prompts - 1 if how == "ending" else at)
        if how == "killed":
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            first = None
            counts.records.kills += 1
            counts.records.torn_by_hand += chance.random() < 0.5 and tear(out, chance)
    runs = []
    for index in range(num_runs):
        time.sleep(chance.uniform(0, spread_s / num_runs))
        runs.append(task.start(out, 1 + index, *ordered, "--resume"))
    for child in runs if first is None else [first, *runs]:
        counts.ended[_ending(child)] += 1
    last = _ending(task.start(out, 1 + num_runs, *ordered, "--resume"))
    counts.ended["failed"] += last != "done"
    judge(out, task.expected, counts.records)
    left = [path.name for path in task.folder.iterdir() if path.name.startswith((".", f"{out.name}."))]
    if left:
        print(f"left behind: {left}")
        counts.records.torn_left += len(left)


def check(folder: Path, *, rounds: int, count: int, spread_s: float, seed: int) -> AtOnce:
    """All rounds."""
    prompts, whole = folder / "prompts.jsonl", folder / "whole.jsonl"
    write_prompts(prompts, count)
    task = Task(folder=folder, prompts=prompts, num_prompts=count, expected={})
    if _ending(task.start(whole, 0)) != "done":
        raise SystemExit("a run alone failed")
    records = map(json.loads, whole.read_text(encoding="utf-8").splitlines())
    task.expected.update({record["id"]: record["turns"] for record in records})
    assert len(task.expected) == count
    counts, chance = AtOnce(), random.Random(seed)
    for number in range(rounds):
        round_of(task, folder / f"out-{number}.jsonl", counts, chance, number=number, spread_s=spread_s)
        if not counts.passed or (number + 1) % 20 == 0:
            said = "passed" if counts.passed else "FAILED"
            print(f"round {number + 1}: {said}; {counts.records.twice} twice; runs {dict(counts.ended)}", flush=True)
    return counts


def _ending(child: Child) -> str:
    """Wait for a run, and say how it ended."""
    status = child.wait()
    if status == 0:
        return "done"
    messages = child.messages.read_text(errors="replace")
    if status == 1 and TAKEN in messages:
        return "refused"
    print(f"a run ended with status {status}: {messages}")
    return "failed"


def _wait_for(child: Child, out: Path, *, num_records: int) -> None:
    while child.is_running() and num_lines(out) < num_records:
        time.sleep(POLL_S)


def main() -> int:
    """Run the rounds and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--spread", type=float, default=0.4, help="seconds within which a round's runs resume")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = check(
            Path(folder),
            rounds=arguments.rounds,
            count=arguments.prompts,
            spread_s=arguments.spread,
            seed=arguments.seed,
        )
    records = counts.records
    print(
        f"{arguments.rounds} rounds of {arguments.prompts} prompts ({dict(counts.rounds_of)}), {records.kills} kills, "
        f"{records.torn_by_hand} lines torn by hand; runs {dict(counts.ended)}: {records.lost} lost, "
        f"{records.twice} twice, {records.torn_left} torn or left behind, {records.different} different"
    )
    print(json.dumps({"rounds": arguments.rounds, "seed": arguments.seed, "ended": counts.ended} | vars(records)))
    return 0 if counts.passed else 1


if __name__ == "__main__":
    sys.exit(main())
