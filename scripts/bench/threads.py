"""What threads yield on an idle machine, and beside a program that keeps one core busy.

    python -m scripts.bench.threads --tokens 96

The built-in pair decodes greedily, plainly and with trees, with as many threads as there are cores, with those that
edgespec chooses, and with one. Each is a process of its own, in turns: how OpenMP's threads wait is settled when torch
is imported. The neighbour is a busy loop that this script starts. Prints medians of tokens a second, the ratios, what
other programs took of the processors meanwhile (the neighbour included), and one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.machine.cpu import CHOSEN_BY

ROOT = Path(__file__).parents[2]
LOADS = ("idle", "neighbour")
MODES = ("plain", "tree")
WAYS = ("all", "auto", "one")
PROMPT = "def main(arguments):\n"
WARM_UP_TOKENS = 32


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="of every text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cell", nargs=2, metavar=("MODE", "WAY"), help="measure this alone, in this process")
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measure(*arguments.cell, tokens=arguments.tokens)))
        return 0
    cells: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for repeat in range(arguments.repeats):
        for load in LOADS:
            with neighbour(load == "neighbour"):
                for mode in MODES:
                    for way in WAYS[:: 1 if repeat % 2 == 0 else -1]:
                        cells.setdefault((load, mode, way), []).append(cell(mode, way, arguments.tokens))
    print(f"{'load':<11}{'mode':<7}" + "".join(f"{way:>8}" for way in WAYS) + "  auto/all  auto/one  others")
    for load in LOADS:
        for mode in MODES:
            speeds = {way: median(cells[load, mode, way], "tokens_per_s") for way in WAYS}
            others = statistics.median(median(cells[load, mode, way], "others") for way in WAYS)
            ratios = f"{speeds['auto'] / speeds['all']:>10.2f}{speeds['auto'] / speeds['one']:>10.2f}{others:>8.2f}"
            print(f"{load:<11}{mode:<7}" + "".join(f"{speeds[way]:>8.1f}" for way in WAYS) + ratios)
    rows = [{"load": load, "mode": mode, "way": way, "runs": runs} for (load, mode, way), runs in cells.items()]
    print(json.dumps({"tokens": arguments.tokens, "cells": rows, **circumstances()}))
    return 0


def measure(mode: str, way: str, *, tokens: int) -> dict[str, float]:
    """Decode a text of so many tokens, and return its speed while decoding; the prompt's pass is not in it."""
    import torch

    from edgespec import Engine, TreeSettings
    from edgespec.machine.cpu import read_cpu
    from edgespec.tuning.threads import OthersLoad

    cpu = read_cpu()
    tree = TreeSettings() if mode == "tree" else TreeSettings(policy="none")
    threads = {"all": cpu.usable, "auto": None, "one": 1}[way]
    with Engine.from_pretrained(tree=tree, threads=threads, context_tokens=tokens + 64) as engine:
        engine.generate(PROMPT, max_new_tokens=WARM_UP_TOKENS, temperature=0)
        others = OthersLoad(cpu.allowed)
        result = engine.generate(PROMPT, max_new_tokens=tokens, temperature=0)
        seconds = sum(step.total_s for step in result.passes)
        return {
            "tokens_per_s": sum(len(step.tokens) for step in result.passes) / seconds,
            "others": others() or 0.0,
            "threads": torch.get_num_threads(),
        }


def cell(mode: str, way: str, tokens: int) -> dict[str, float]:
    """Measure in a process of its own, whose environment chooses no number of threads."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN_BY}
    command = [sys.executable, "-m", "scripts.bench.threads", "--cell", mode, way, "--tokens", str(tokens)]
    found = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    measured: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return measured


@contextlib.contextmanager
def neighbour(is_there: bool) -> Iterator[None]:
    """Within this block another program keeps one core busy, if it is to be there."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_there else None
    try:
        yield
    finally:
        if program is not None:
            program.kill()
            program.wait()


def median(runs: list[dict[str, float]], name: str) -> float:
    """Of one number of some runs."""
    return statistics.median(run[name] for run in runs)


def circumstances() -> dict[str, Any]:
    """Where this was measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "commit": commit.stdout.strip() or None,
    }


if __name__ == "__main__":
    sys.exit(main())
