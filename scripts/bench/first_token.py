"""Seconds to the first token of a command that has just been started, at a file's first start and at later ones.

    python -m scripts.bench.first_token MODEL.gguf [MORE.gguf ...]
    python -m scripts.bench.first_token MODEL.gguf --draft DRAFT.gguf --starts 5 --on-disk

A model's first start has an empty cache of edgespec's; later ones find what it kept, as the tokenizer's merges. With
`--on-disk` no page of the file is in memory before a start. Each start is a process of its own: `edgespec generate`,
whose first byte of text counts. Seconds count on a quiet machine only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "The capital of France is"


def main() -> None:
    """Start each model several times, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files, or folders")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--starts", type=int, default=4, help="of each model, the first among them")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--on-disk", action="store_true", help="drop the model's pages before each start")
    arguments = parser.parse_args()
    print(f"{'model':<40} {'GiB':>6} {'first start':>12} {'later starts, median (best to worst)':>38}")
    for model in arguments.models:
        files = [path for path in (model.rglob("*") if model.is_dir() else [model]) if path.is_file()]
        seconds = []
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(arguments.starts):
                for path in files:
                    bring(path, drops=arguments.on_disk)
                seconds.append(first_token(model, arguments.draft, Path(cache), arguments.threads))
        size = sum(path.stat().st_size for path in files) / (1 << 30)
        first, *later = seconds
        rest = f"{statistics.median(later):.2f} s ({min(later):.2f} to {max(later):.2f})" if later else "-"
        print(f"{model.name[-40:]:<40} {size:>6.3f} {first:>10.2f} s {rest:>38}", flush=True)


def first_token(model: Path, draft: Path | None, cache: Path, threads: int | None) -> float:
    """Return the seconds from a process' start to the first byte of its text."""
    command = [sys.executable, "-m", "edgespec", "generate", "-p", PROMPT, "-m", str(model), "-n", "4", "--temp", "0"]
    command += [] if draft is None else ["-md", str(draft)]
    command += [] if threads is None else ["--threads", str(threads)]
    environment = {**os.environ, "EDGESPEC_CACHE": str(cache)}
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, env=environment) as child:
            assert child.stdout is not None
            first = child.stdout.read(1)
            seconds = time.perf_counter() - started
            child.stdout.read()
        if child.returncode or not first:
            said.seek(0)
            raise SystemExit(said.read().decode(errors="replace") or f"{model} gave no text")
    return seconds


def bring(path: Path, *, drops: bool) -> None:
    """Have a file's pages in memory, or none of them."""
    with path.open("rb", buffering=0) as file:
        if drops:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        while file.read(1 << 24):
            pass


if __name__ == "__main__":
    main()
