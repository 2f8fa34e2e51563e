"""Checks of whether this machine is fit to run, as far as torch is not needed: versions, memory, threads, own files.

Each check yields a status and a sentence. `fail` is for what would stop a run, `warn` for what makes
it slow or worse than it could be.
"""

import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from edgespec import __version__
from edgespec.hub.gguf_models import files_of, gguf_files
from edgespec.hub.ollama import ollama_models
from edgespec.hub.other_programs import ollama_folders, program_folders
from edgespec.machine.cpu import WAITING, chosen_by, read_cpu, threads_in_words
from edgespec.machine.host_memory import free_host_bytes
from edgespec.user_paths import cache_folder, has_place, history_file, profiles_folder, sessions_folder, shown_place

GIB = 1 << 30
OK, WARN, FAIL = "ok", "warn", "fail"
DISTRIBUTION = "edgespec"
MIN_FREE_BYTES = 2 * GIB  # of RAM, for the libraries, a small draft and room to stream
MAX_COUNTED_FILES = 20_000  # of a folder whose size is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of a check: a status and a sentence about one part of the machine."""

    name: str
    status: str  # ok | warn | fail
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # the same for programs


def check_versions() -> Check:
    """Check the versions of Python, edgespec and the packages that it needs."""
    required, missing, old = {}, [], []
    for name, least in _requirements().items():
        try:
            required[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if _numbers(required[name]) < _numbers(least):
            old.append(f"{name} {required[name]} is older than {least}")
    versions = {"edgespec": __version__, "python": platform.python_version(), **required}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    system = f"{platform.system()} {platform.machine()}"
    if missing:
        text = f"missing packages: {', '.join(missing)} (pip install edgespec brings them); there are {shown}"
        return Check(name="versions", status=FAIL, text=text, facts=versions)
    if old:
        text = f"{'; '.join(old)} (pip install --upgrade edgespec); there are {shown}"
        return Check(name="versions", status=WARN, text=text, facts=versions)
    return Check(
        name="versions", status=OK, text=f"{shown}; {system}", facts={**versions, "system": platform.platform()}
    )


def _requirements() -> dict[str, str]:
    """Return the packages that edgespec needs, and their least versions, as its installed metadata tells."""
    try:
        stated = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        stated = ["torch", "transformers", "safetensors"]
    found = {}
    for line in stated:
        name = re.match(r"[\w.-]+", line)
        if name and "extra ==" not in line:
            least = re.search(r">=\s*([\d.]+)", line)
            found[name[0]] = least[1] if least else "0"
    return found


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def check_memory() -> Check:
    """Check that there is free RAM."""
    memory = psutil.virtual_memory()
    free_bytes = free_host_bytes()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of RAM are free"
    if free_bytes < memory.available:
        text += f", of which this process's control group leaves {free_bytes / GIB:.1f} GiB"
    status = OK if free_bytes >= MIN_FREE_BYTES else WARN
    if status == WARN:
        text += ": little room for anything but streaming from disk"
    return Check(name="memory", status=status, text=text, facts={"free_bytes": free_bytes, "total_bytes": memory.total})


def check_threads() -> Check:
    """Say how many threads runs on the CPU take, and how those wait for each other."""
    cpu = read_cpu()
    waiting = {name: os.environ[name] for name in WAITING if os.environ.get(name)}
    told = ", ".join(f"{name}={value}" for name, value in waiting.items())
    text = f"{threads_in_words(cpu, os.environ)}; they wait as {told or 'OpenMP has it: spinning'}"
    facts = {
        "usable": cpu.usable, "physical": cpu.physical, "allowed": len(cpu.allowed), "machine": cpu.machine,
        "quota": cpu.quota, "chosen_by": chosen_by(os.environ), "waiting": waiting,
    }  # fmt: skip
    return Check(name="threads", status=OK, text=text, facts=facts)


def check_places() -> Iterator[Check]:
    """Check the places where edgespec keeps files of its own."""
    places: dict[str, Callable[[], Path]] = {
        "cache": cache_folder,
        "profiles folder": profiles_folder,
        "sessions": sessions_folder,
        "history": history_file,
    }
    for name, place in places.items():
        path = place()
        if not has_place(path):
            yield Check(name=name, status=WARN, text=shown_place(path), facts={"path": None})
            continue
        facts: dict[str, Any] = {"path": str(path)}
        text, problem = str(path), None
        try:
            is_there = path.exists()
            num_bytes, is_whole = size_of(path)
            facts |= {"bytes": num_bytes, "exists": is_there}
            text += f", {describe_size(num_bytes, is_whole=is_whole)}" if is_there else ", not there yet"
            _try_to_write(path)
        except OSError as error:
            problem = f": it cannot be written ({error.strerror}); EDGESPEC_HOME chooses another place"
        yield Check(name=name, status=WARN if problem else OK, text=text + (problem or ""), facts=facts)


def check_other_programs() -> Check:
    """Say which GGUF files llama.cpp, LM Studio and Ollama keep here; nothing is written there."""
    found: list[dict[str, Any]] = []
    for program, folder, depth in program_folders():
        files = list(gguf_files(folder, depth=depth))
        num_bytes = sum(part.stat().st_size for path in files for part in files_of(path))
        found.append({"program": program, "path": str(folder), "models": list(map(str, files)), "bytes": num_bytes})
    names = list(ollama_models())
    for folder in ollama_folders():
        models = [name for name, of, _ in names if of == folder]
        num_bytes = size_of(folder / "blobs")[0] if models else 0
        found.append({"program": "Ollama", "path": str(folder), "models": models, "bytes": num_bytes})
    shown = [
        f"{each['program']}: {len(each['models'])} in {each['path']}, {describe_size(each['bytes'])}"
        for each in found
        if each["models"]
    ]
    text = f"{'; '.join(shown)} (edgespec models)" if shown else "llama.cpp, LM Studio and Ollama keep no model here"
    return Check(name="GGUF files", status=OK, text=text, facts={"places": found})


def _try_to_write(path: Path) -> None:
    """Raise OSError where a file or folder cannot be written, or not be made; nothing is left behind.

    Access rights do not decide: they do not know of file systems that take nothing.
    """
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if existing == path and path.is_file():
        path.open("ab").close()
        return
    with tempfile.TemporaryFile(dir=existing):
        pass


def size_of(path: Path) -> tuple[int, bool]:
    """Return the bytes of a file, or of the files below a folder, and whether all of them were counted.

    Links are not followed.
    """
    total = 0
    for number, below in enumerate([path] if path.is_file() else path.rglob("*")):
        if number >= MAX_COUNTED_FILES:
            return total, False
        try:
            total += below.lstat().st_size if not below.is_symlink() and below.is_file() else 0
        except OSError:
            continue
    return total, True


def describe_size(num_bytes: int, *, is_whole: bool = True) -> str:
    """Return the bytes in words for people."""
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (1 << 20, "MiB")
    return f"{'' if is_whole else 'at least '}{num_bytes / unit:.1f} {name}"
