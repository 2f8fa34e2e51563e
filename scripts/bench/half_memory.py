"""llama.cpp and edgespec on one GGUF file, each in a memory cgroup that holds half of its weights.

    pip install xllamacpp gguf
    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.half_memory large                       writes its q4_0 file first
    python -m scripts.make.inflate_experts mixture --experts 32 --hidden 1024 --inner 1536
    python -m scripts.bench.half_memory mixture --gguf FOLDER --repeats 3 --threads 2

A system's limit is --share of the file's bytes, and what the same program allocates with the built-in draft as its
model: libraries and contexts. Each run has a fresh process and a fresh group, and finds none of the weights in the
page cache, because pages that another group has read count there. llama.cpp reads weights where the file is mapped: a
copy in its own order does not fit, and the system would end it. edgespec runs as by default, plainly and with trees;
its limit is stated as `max_cpu_mem`: the share, and what a plan counts for libraries, most of which are pages of
files that another group has read. Systems take turns, and continue the same
prompts greedily; reading the prompts counts. Needs the right to make control groups (root, or a delegated one). Prints
medians of tokens/s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.config import MemoryLimits
from edgespec.machine.cgroup import cgroup_folders
from edgespec.machine.host_memory import LIMIT
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.placement.memory import LIBRARIES_BYTES
from edgespec.user_paths import cache_folder
from scripts.bench.llama_cpp import AS_GIVEN, System, run_edgespec, run_llama_cpp, write_gguf
from scripts.situations import GIB, MIB, disk_read_bytes, read_texts, write_prompts

SYSTEMS = (("llama.cpp", "none"), ("edgespec", "none"), ("edgespec", "tuned"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One system, the file that it runs, and its limit."""

    system: System
    model: Path
    limit_bytes: int | None  # None: as much as there is
    stated_bytes: int | None = None  # of these, what edgespec is told


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield the folder of a new control group with this limit, which is removed at the end."""
    reasons = []
    for version, parent in cgroup_folders("memory"):
        folder = parent / f"edgespec-half-{os.getpid()}"
        try:
            if version == max(LIMIT):
                (parent / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
            folder.mkdir()
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        try:
            (folder / LIMIT[version]).write_text(str(limit_bytes), encoding="ascii")
            yield folder
        finally:
            folder.rmdir()
        return
    raise SystemExit(f"no memory group can be made here ({'; '.join(reasons) or 'the system has none'}); run as root")


def drop_cached(*folders: Path) -> None:
    """Let the page cache lose all files below some folders."""
    os.sync()
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def start(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a system in a process of its own, within its limit; what it reports."""
    stated = {**asdict(run), "model": str(run.model)}
    command = [sys.executable, "-m", "scripts.bench.half_memory", *sys.argv[1:], "--child", json.dumps(stated)]
    drop_cached(arguments.gguf, cache_folder())
    if run.limit_bytes is None:
        return _report(run, subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False))
    with memory_group(run.limit_bytes) as folder:

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

        return _report(run, subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=enter))


def _report(run: Run, child: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if child.returncode:
        why = "the system ended it for want of memory" if child.returncode == -9 else "its message is above"
        raise SystemExit(f"{run.system.name} failed: {why}")
    report: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return report


def child(stated: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Run one system here, and print what it does in a second, its peak memory and what it read."""
    run = Run(**{**stated, "system": System(**stated["system"]), "model": Path(stated["model"])})
    arguments.model, arguments.mapped = run.model, True
    prompts = read_texts(arguments.gguf / "prompts.jsonl")
    if run.system.kind == "llama.cpp":
        per_s = run_llama_cpp(run.system, arguments, prompts)
    else:
        options: dict[str, Any] = {"draft": DEMO_FOLDER / "draft"}
        if run.stated_bytes is not None:
            options["limits"] = MemoryLimits(max_cpu_bytes=run.stated_bytes)
        per_s = run_edgespec(run.system, arguments, prompts, **options)
    found = {"per_s": per_s, "bytes": allocated_bytes(), "read_bytes": disk_read_bytes()}
    print(json.dumps(found))


def allocated_bytes() -> int:
    """Return this process's own memory: pages of libraries' files count for the group that read them first."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    """All systems in turn, then their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint of the built-in pair's tokens, or a GGUF file of them")
    parser.add_argument("--gguf", type=Path, help="a folder for the GGUF files, which are kept")
    parser.add_argument("--type", default="q4_0", choices=["f16", "q8_0", "q4_0"])
    parser.add_argument("--share", type=float, default=0.5, help="of the file's bytes that a system may have")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-n", "--new-tokens", type=int, default=32)
    parser.add_argument("--num-prompts", type=int, default=2)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.set_defaults(published=[])  # as the script whose systems these are
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child), arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.gguf is None:
            arguments.gguf = Path(folder)
            sys.argv += ["--gguf", folder]
        arguments.gguf.mkdir(exist_ok=True, parents=True)
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Run the systems in turn and print their medians."""
    write_prompts(arguments.gguf, arguments.num_prompts)
    target, draft = arguments.model, arguments.gguf / "draft-f16.gguf"
    if target.suffix != ".gguf":
        target = arguments.gguf / f"target-{arguments.type}.gguf"
        if not target.exists():
            write_gguf(arguments.model, target, arguments.type)
    if not draft.exists():
        write_gguf(DEMO_FOLDER / "draft", draft, "f16")
    systems = [
        System(kind=kind, weights=AS_GIVEN, draft=drafted, texts=1, threads=arguments.threads)
        for kind, drafted in SYSTEMS
    ]
    half_bytes = int(arguments.share * target.stat().st_size)
    runs = []
    for system in systems:
        beside = start(Run(system=system, model=draft, limit_bytes=None), arguments)
        limit_bytes = half_bytes + beside["bytes"]
        stated_bytes = half_bytes + LIBRARIES_BYTES if system.kind == "edgespec" else None
        runs.append(Run(system=system, model=target, limit_bytes=limit_bytes, stated_bytes=stated_bytes))
        print(f"{system.name}: {half_bytes / MIB:.0f} + {beside['bytes'] / MIB:.0f} MiB", file=sys.stderr)
    for run in runs:
        if run.stated_bytes is not None:
            start(Run(system=run.system, model=target, limit_bytes=None), arguments)  # packs what it keeps, once
    found: dict[str, list[dict[str, Any]]] = {run.system.name: [] for run in runs}
    for _ in range(arguments.repeats):
        for run in runs:
            report = start(run, arguments)
            found[run.system.name].append(report)
            read = f"{report['read_bytes'] / GIB:.2f} GiB read"
            print(f"{run.system.name}: {report['per_s']:.3f} tokens/s, {read}", file=sys.stderr)
    for name, reports in found.items():
        speeds = [report["per_s"] for report in reports]
        print(f"{name:60} {statistics.median(speeds):8.3f} tokens/s ({min(speeds):.3f} to {max(speeds):.3f})")


if __name__ == "__main__":
    main()
