"""Runs of `edgespec generate` in processes of their own, and what their files have in common."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.002
SAME = ("turns", "token_ids", "finish_reason", "error", "config", "config_hash", "sampling", "prompt")
Records = dict[str, list[dict[str, Any]]]


def start(prompts: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """Begin a run in a process of its own."""
    command = [sys.executable, "-m", "edgespec", "generate", str(prompts), "-o", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def num_lines(out: Path) -> int:
    """Count the whole lines of a file."""
    return out.read_bytes().count(b"\n") if out.exists() else 0


def wait_for(process: subprocess.Popen[bytes], out: Path, num_records: int) -> bool:
    """Wait until the file of a run has that many records; return False where the run has ended before."""
    while process.poll() is None and num_lines(out) < num_records:
        time.sleep(POLL_S)
    return process.poll() is None


def read(out: Path) -> Records:
    """Return the records of a file by their ids."""
    found: Records = {}
    for line in out.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["id"], []).append(record)
    return found


def compare(expected: Records, found: Records) -> Counter[str]:
    """Count what is lost, doubled and different."""
    counts = Counter({"lost": 0, "doubled": 0, "different": 0})
    for name, (record,) in expected.items():
        here = found.get(name, [])
        counts["lost"] += not here
        counts["doubled"] += max(0, len(here) - 1)
        counts["different"] += any(one[key] != record[key] for one in here[:1] for key in SAME)
    return counts


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of a run's workers."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in children:
        try:
            if child.cmdline() and child.cmdline()[0].startswith("ray::Actor"):
                found.append(child)
        except psutil.Error:
            continue
    return found
