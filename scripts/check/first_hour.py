"""Record a newcomer's first hour: each command of the README and usual mistakes, in a terminal of its own.

    python -m scripts.check.first_hour --program VENV/bin/edgespec --columns 80 > hour.txt
    python -m scripts.check.first_hour --only 'profile$'              the measuring of the pair alone, to its end

The home is empty at first. Printed are the seconds until something stands on the screen, those until the command has
ended, its exit status, and what the terminal shows then; at last a table.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pexpect
import pyte

DEMO = Path(__file__).parents[2] / "edgespec/demo"
ROWS = 24
CTRL_C, CTRL_D, READY = "\x03", "\x04", "> "
WRITE = "generate p.jsonl -o out.jsonl -n 400 --seed 7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is typed: a command, and keys that are sent once a text has come (or some seconds have passed)."""

    command: str
    keys: Sequence[tuple[str | float, str | bytes]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What came of a step."""

    first_s: float
    total_s: float
    status: int
    screens: Sequence[str]  # when keys were sent, and at the end


def steps(program: str) -> Iterator[Step]:
    """Yield the commands in a newcomer's order."""
    plain = (
        "--version", "--help", "doctor", "generate prompts.jsonl -n 64 --seed 7 -ngl 0",
        "generate -p 'def read_lines(path):' -n 64", "generate p.jsonl --dry-run", "generate p.txt -n 40 --seed 7",
        "generate -p 'def main(' -n 40 | cat", "generate p.jsonl -n 40 --temp 0 --format text",
    )  # fmt: skip
    yield from (Step(command=f"{program} {words}") for words in plain)
    yield Step(command=f"{program} {WRITE}", keys=[("at most", CTRL_C)])
    yield Step(command=f"{program} {WRITE} --resume")
    chat = [
        "def read_lines(path):\r", "/help\r", "/set temperature 0.5\r", "/regen\r", "/stats\r", "/save talk.json\r",
        "/sav\r", "def main(\r",
    ]  # fmt: skip
    keys = [(READY, line) for line in chat] + [(0.4, CTRL_C), (READY, CTRL_D)]
    yield Step(command=f"{program} chat -n 200", keys=keys)
    others = (
        "estimate", "estimate --hardware 4090", "profile", "profile --list", "generate -p 'def main(' -n 64",
        "bench -n 32 --repeats 1", "models", "cache list", "config init", "config show", "genrate p.jsonl",
        "generate 'def main('", "generate nowhere.jsonl", "generate -p hi --max-tokns 5", "generate -p hi -m nowhere",
        "generate -p hi -m Qwen/Qwen3-32B", "generate p.jsonl -o out.jsonl", "generate p.jsonl -o /nowhere/out.jsonl",
        "generate p.jsonl -n 9 > /dev/full", "generate -p hi --temp -1",
        "generate", "chat nowhere", "chat < p.txt", "estimate --hardware 9999", "generate p.jsonl --max-cpu-mem 10MiB",
        "generate bad.jsonl", "generate -p hi --json-schema nowhere.json", "generate -p hi --quant q4_k_m",
    )  # fmt: skip
    yield from (Step(command=f"{program} {words}") for words in others)
    yield from _real_inputs(program)


def _real_inputs(program: str) -> Iterator[Step]:
    """Yield what people have: rows through pipes and of other tools, pasted bytes, no home, no terminal to draw on."""
    short = f"{program} generate"
    yield from (
        Step(command=command)
        for command in (
            f"cat p.jsonl | {short} - -n 9 --temp 0 -q", f"gzip -k p.jsonl; {short} p.jsonl.gz -n 9 --temp 0 -q",
            f"{short} tools.jsonl -n 9", f"{short} p.jsonl -n 9 --temp 0 -o - -q", f"{short} vague.jsonl -n 9",
            f"env -u HOME {short} -p 'def main(' -n 9", f"HOME=/proc {short} -p 'def main(' -n 9 --quant nf4",
            f"{short} -p 'def main(' -n 16.0 --top-k -1", f"{short} -p x --grammar nothing.gbnf",
        )
    )  # fmt: skip
    yield Step(
        command=f"{program} chat -n 9", keys=[(READY, b"gr\xfc\xdfe\r"), (READY, "def main(\r"), (READY, CTRL_D)]
    )
    yield Step(command=f"TERM=dumb {program} chat -n 9", keys=[(READY, "def main(\r"), (READY, CTRL_D)])


def record(step: Step, folder: Path, columns: int) -> Recorded:
    """Type a step in a terminal, and return what it shows."""
    screen = pyte.HistoryScreen(columns, ROWS, history=5000)
    stream = pyte.ByteStream(screen)
    own = {"HOME": str(folder), "TERM": "xterm-256color", "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    started = time.monotonic()
    child = pexpect.spawn("bash", ["-c", step.command], cwd=folder, env=own, dimensions=(ROWS, columns), timeout=None)
    screens: list[str] = []
    first_s, sent_at = 0.0, started
    keys = list(step.keys)
    while True:
        try:
            got = child.read_nonblocking(65536, timeout=0.05)
        except pexpect.TIMEOUT:
            got = b""
        except pexpect.EOF:
            break
        now = time.monotonic()
        if got:
            if b"\x1b[6n" in got:  # where the cursor is
                child.send(f"\x1b[{screen.cursor.y + 1};{screen.cursor.x + 1}R")
            stream.feed(got)
            first_s = first_s or now - started
        if keys and _has_come(keys[0][0], screen, now - sent_at):
            screens.append(shown(screen))
            child.send(keys.pop(0)[1])
            sent_at = now
    child.close()
    status = child.exitstatus if child.exitstatus is not None else 128 + (child.signalstatus or 0)
    screens.append(shown(screen))
    return Recorded(first_s=first_s, total_s=time.monotonic() - started, status=status, screens=screens)


def _has_come(awaited: str | float, screen: pyte.Screen, waited_s: float) -> bool:
    """Return whether the text stands on the screen, or an empty prompt if it is that, or the seconds have passed."""
    if isinstance(awaited, float):
        return waited_s >= awaited
    if awaited != READY:
        return any(awaited in line for line in screen.display)
    return waited_s > 0.3 and screen.display[screen.cursor.y].rstrip() == READY.rstrip()


def shown(screen: pyte.HistoryScreen) -> str:
    """Return all lines that came, the newest last."""
    old = ["".join(line[column].data for column in range(screen.columns)) for line in screen.history.top]
    return re.sub(r"\s+\Z", "", "\n".join(line.rstrip() for line in [*old, *screen.display]))


def main() -> None:
    """Record all steps, or those whose command has the words of --only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="edgespec")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--only", default="", help="a regular expression of the commands to record")
    asked = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        rows = (DEMO / "prompts.jsonl").read_text().splitlines(keepends=True)
        (home / "prompts.jsonl").write_text("".join(rows))
        (home / "p.jsonl").write_text("".join(rows[:3]))
        (home / "p.txt").write_text("def read_lines(path):\n")
        (home / "tools.jsonl").write_text(
            '{"prompt": "def main(", "options": {"num_predict": 8, "repeat_penalty": 1.1}, "bad_words": ["x"]}\n'
        )
        (home / "vague.jsonl").write_text(
            '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "n": 2}\n'
        )
        (home / "nothing.gbnf").write_text('root ::= root "a"\n')
        (home / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
        for step in steps(asked.program):
            if not re.search(asked.only, step.command):
                continue
            found = record(step, home, asked.columns)
            command = step.command.replace(asked.program, "edgespec", 1)
            table.append(f"{command:<60} {found.first_s:8.2f} {found.total_s:8.1f} {found.status:5}")
            rule = "-" * asked.columns
            print(f"$ {command}\n" + f"\n{rule}\n".join(found.screens) + f"\n[{table[-1][60:].strip()}]\n", flush=True)
    print(f"{'command':<60} {'first s':>8} {'seconds':>8} {'exit':>5}", *table, sep="\n")


if __name__ == "__main__":
    main()
