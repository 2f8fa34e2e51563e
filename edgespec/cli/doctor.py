"""`edgespec doctor`: whether this machine is fit to run, check by check."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator

import click

from edgespec.cli.config.groups import load_config
from edgespec.cli.console import counted, write_lines
from edgespec.cli.ctrl_c import leaving_at_once
from edgespec.cli.spelling import spelled
from edgespec.doctor.checks import (
    FAIL,
    OK,
    WARN,
    Check,
    check_memory,
    check_other_programs,
    check_places,
    check_threads,
    check_versions,
    describe_size,
    size_of,
)
from edgespec.errors import EXIT_RUNTIME, EdgespecError
from edgespec.hub.cache import cached_repositories, hub_cache
from edgespec.hub.gguf_models import files_of
from edgespec.hub.names import resolve_model
from edgespec.hub.places import cached_adapters
from edgespec.hub.user_config import UserConfig
from edgespec.user_paths import cache_folder, config_file, config_files, shown_place

SLOW_BYTES_PER_S = 200e6  # of a disk: a spinning one, or a network's
# Other variables of the environment that the libraries read; none of them is a secret.
SHOWN_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "EDGESPEC_HOME", "EDGESPEC_CACHE")


@click.command(
    name="doctor",
    epilog="""\b
Examples:
  edgespec doctor
  edgespec doctor TARGET                 the disk's speed from that model's own files
  edgespec doctor --json > doctor.json   for a bug report: it holds paths, and no secrets

Exit code 0, or 1 where something that is needed is broken.
""",
)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@click.pass_context
def command(context: click.Context, *, model: str | None, as_json: bool) -> int:
    """Check whether this machine is fit to run.

    Looks at versions, devices, memory, threads, disk, caches, profiles and configuration, in a few seconds.
    """
    checks = []
    for found in _checks(context, model):
        check = dataclasses.replace(found, text=spelled(found.text))
        checks.append(check)
        if not as_json:
            write_lines(f"{check.status:<5} {check.name}: {check.text}", indent=" " * 6)
            sys.stdout.flush()
    is_fit = all(check.status != "fail" for check in checks)
    if as_json:
        sys.stdout.write(json.dumps({"ok": is_fit, "checks": [dataclasses.asdict(check) for check in checks]}) + "\n")
    return 0 if is_fit else EXIT_RUNTIME


def _checks(context: click.Context, model: str | None) -> Iterator[Check]:
    yield check_versions()
    yield check_memory()
    yield check_threads()
    try:
        with leaving_at_once():
            from edgespec.doctor.machine import check_machine
    except (ImportError, OSError) as error:  # a library of torch's own that is not there is an OSError
        yield Check(name="device", status=FAIL, text=f"torch cannot be used ({error}): install it again")
    else:
        yield from check_machine()
    yield from check_places()
    found, configuration = _configuration(context)
    yield configuration
    yield _hub()
    yield check_other_programs()
    yield _offline()
    yield _built_in()
    yield from _disk(model, found)


def _configuration(context: click.Context) -> tuple[UserConfig, Check]:
    paths = [str(path) for path in config_files(context.find_root().params.get("config"))]
    try:
        found = load_config(context)
    except EdgespecError as error:
        check = Check(name="configuration", status=FAIL, text=f"{error.what} {error.fix}", facts={"files": paths})
        return UserConfig(), check
    names = ", ".join(found.aliases) or "none"
    text = (
        f"{', '.join(paths)}; names for pairs: {names}"
        if paths
        else f"{shown_place(config_file())}, not there yet (config init)"
    )
    return found, Check(name="configuration", status=OK, text=text, facts={"files": paths, "models": found.aliases})


def _hub() -> Check:
    path = hub_cache()
    adapters = [name for name, _ in cached_adapters()]
    repositories = [name for name, _ in cached_repositories() if name not in adapters]
    num_bytes, is_whole = size_of(path)
    size = describe_size(num_bytes, is_whole=is_whole)
    count = counted(len(repositories), "model") + (f", {counted(len(adapters), 'adapter')}" if adapters else "")
    holds = f"{size}, {count} (edgespec models)" if path.exists() else "not there yet"
    facts = {"path": str(path), "bytes": num_bytes, "models": repositories, "adapters": adapters}
    return Check(name="Hugging Face cache", status=OK, text=f"{path}, {holds}", facts=facts)


def _offline() -> Check:
    seen = {name: os.environ[name] for name in SHOWN_VARIABLES if os.environ.get(name)}
    shown = "".join(f"; {name}={value}" for name, value in seen.items())
    text = f"nothing asks the network but a command with --online{shown}"
    return Check(name="offline", status=OK, text=text, facts={"offline": True, "variables": seen})


def _built_in() -> Check:
    from edgespec.hub.names import BUILT_IN_TARGET

    folders = (BUILT_IN_TARGET, BUILT_IN_TARGET.with_name("draft"))
    is_there = all((folder / "model.safetensors").is_file() for folder in folders)
    text = f"in {BUILT_IN_TARGET.parent}" if is_there else f"not whole in {BUILT_IN_TARGET.parent}: install again"
    return Check(name="built-in pair", status=OK if is_there else FAIL, text=text, facts={"present": is_there})


def _disk(model: str | None, config: UserConfig) -> Iterator[Check]:
    """Check the speed of the disk that layers would stream from."""
    try:
        from edgespec.doctor.disk_speed import read_speed, scratch_speed
    except (ImportError, OSError):  # of torch, and said
        return
    tried = cache_folder()
    try:
        if model is not None:
            tried = resolve_model(model, aliases=config.aliases)
            files = sorted(tried.glob("*.safetensors")) if tried.is_dir() else files_of(tried)
            if not files:
                raise EdgespecError("E_NO_SAFETENSORS", f"'{tried}' holds no safetensors.", "Name another model.")
            speed = read_speed(files)
        else:
            tried = next(path for path in (cache_folder(), *cache_folder().parents) if path.exists())
            speed = scratch_speed(tried)
    except EdgespecError as error:
        yield Check(name="disk", status=FAIL, text=f"{error.what} {error.fix}")
        return
    except OSError as error:
        tried = tried if model is not None else cache_folder()
        status = FAIL if model is not None else WARN
        yield Check(
            name="disk", status=status, text=f"its speed could not be tried in '{shown_place(tried)}': {error.strerror}"
        )
        return
    rate, mebibytes = speed.bytes_per_s, speed.num_bytes >> 20
    text = f"{rate / 1e9:.2f} GB/s, reading {mebibytes} MiB {'of' if model else 'in'} {tried}"
    if not speed.is_cold:
        text += "; the system may have had them in memory"
    if rate < SLOW_BYTES_PER_S:
        text += ": slow; layers that do not fit memory will wait for it"
    facts = {"bytes_per_s": rate, "bytes": speed.num_bytes, "is_cold": speed.is_cold, "path": str(tried)}
    yield Check(name="disk", status=WARN if rate < SLOW_BYTES_PER_S else OK, text=text, facts=facts)
