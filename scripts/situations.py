"""What several scripts measure on: texts that nothing was fitted on, readers that are slow or cold, processes."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

import offload.loaders
from edgespec import EdgespecError
from edgespec.pair.pair import ModelPair, open_pair
from scripts.make.demo_pair import is_held_out, standard_library_sources

MIB = 1 << 20
GIB = 1 << 30
PROMPT_TOKENS = 160
SEED = 7
LAYERS = "model.layers"
COLD_DISTANCE = 4  # layers from a dropped one to the one that is being read; nothing maps its pages any more


def held_out_halves() -> tuple[list[str], list[str]]:
    """Texts of held-out modules: to fit on, and to compare on."""
    texts = [text for name, text in standard_library_sources() if is_held_out(name)]
    return texts[::2], texts[1::2]


def cut_texts(texts: list[str], *, count: int, tokens: int, seed: int) -> list[str]:
    """Passages of equally many tokens, each from anywhere."""
    tokenizer = open_pair(None, None).tokenizer
    streams = [ids for ids in (tokenizer.encode(text, verbose=False) for text in texts) if len(ids) > tokens]
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        ids = draw.choices(streams, weights=[len(stream) for stream in streams])[0]
        end = draw.randrange(tokens, len(ids) + 1)
        found.append(tokenizer.decode(ids[end - tokens : end]))
    return found


def write_texts(path: Path, texts: Sequence[str]) -> None:
    """Write a prompt a line, as the commands read them."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")


def write_prompts(folder: Path, count: int) -> Path:
    """Write a file of passages from held-out modules that nothing was fitted on."""
    path = folder / "prompts.jsonl"
    write_texts(path, cut_texts(held_out_halves()[1], count=count, tokens=PROMPT_TOKENS, seed=SEED))
    return path


def read_texts(prompts: Path) -> list[str]:
    """The prompts of a file."""
    return [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]


def run_python(*arguments: str) -> str:
    """Return what a fresh interpreter prints; its errors go to this one's stderr."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def idle_peak_bytes() -> int:
    """Return the peak memory of a process that imports the libraries and does nothing."""
    code = (
        "import edgespec, torch, transformers\n"
        "from edgespec.cli.generate.records import peak_resident_bytes\n"
        "print(peak_resident_bytes())"
    )
    return int(run_python("-c", code))


def disk_read_bytes() -> int:
    """What the kernel has read from storage for this process; 0 where it does not say."""
    counters = getattr(psutil.Process(), "io_counters", None)
    return int(counters().read_bytes) if counters else 0


def drop_behind_reader(pair: ModelPair) -> None:
    """Let edgespec's reader find no layer in the page cache, not even when it reads ahead of a pass."""
    load = offload.loaders.CpuLoader.load
    entries = pair.target.checkpoint.tensors.values()
    descriptors = {file: os.open(file, os.O_RDONLY) for file in {entry.file for entry in entries}}
    read: deque[int] = deque()

    def cold_load(self: offload.loaders.CpuLoader, record: Any, slot: int) -> None:
        read.append(record.index)
        if len(read) > COLD_DISTANCE:
            prefix = f"{LAYERS}.{read.popleft()}."
            for entry in entries:
                if entry.name.startswith(prefix):
                    descriptor = descriptors[entry.file]
                    os.posix_fadvise(descriptor, entry.offset, entry.num_bytes, os.POSIX_FADV_DONTNEED)
        load(self, record, slot)

    offload.loaders.CpuLoader.load = cold_load  # type: ignore[method-assign]


def wait_for_link(num_bytes: int, started: float, bytes_per_s: float) -> None:
    """Return when a link of that speed would have moved the bytes."""
    time.sleep(max(0.0, started + num_bytes / bytes_per_s - time.perf_counter()))


class SharedLink:
    """A link that moves one thing at a time."""

    def __init__(self) -> None:
        self._lock, self._free_at = threading.Lock(), 0.0

    def wait(self, num_bytes: int, started: float, bytes_per_s: float) -> None:
        """Return when it would have moved the bytes, behind what it moves for others."""
        with self._lock:
            begun = max(started, self._free_at)
            self._free_at = begun + num_bytes / bytes_per_s
        wait_for_link(num_bytes, begun, bytes_per_s)


def throttle_edgespec(bytes_per_s: float, *, wait: Callable[[int, float, float], None] = wait_for_link) -> None:
    """Every load of a streamed layer takes its time, on the reader's thread."""
    load = offload.loaders.CpuLoader.load

    def slow_load(self: offload.loaders.CpuLoader, record: Any, slot: int) -> None:
        started = time.perf_counter()
        load(self, record, slot)
        wait(record.stored_bytes, started, bytes_per_s)

    offload.loaders.CpuLoader.load = slow_load  # type: ignore[method-assign]


def start_child(module: str, system: Any) -> dict[str, Any]:
    """Run one system (a record with a name and a mode) in its own process, with this one's options; its last line."""
    command = [sys.executable, "-m", module, *sys.argv[1:], "--child", json.dumps(dataclasses.asdict(system))]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode:
        raise SystemExit(f"{system.name} ({system.mode}) failed; its message is above")
    report: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return report


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the script with what its main function returns; an error for users is said as the commands say it."""
    try:
        sys.exit(main())
    except EdgespecError as error:
        sys.exit(f"Error: {error.what}\nTry: {error.fix}")
