"""Whether workers would write the same texts: models, versions and settings are compared before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.distributed.worker import WorkerInfo
from edgespec.errors import EdgespecError

MAX_SHOWN = 60  # characters of a value
FIX = "Give all machines the same models, edgespec and libraries; name `device` and `dtype` where machines are unlike."


def shared_settings(infos: Mapping[str, WorkerInfo]) -> dict[str, Any]:
    """Return the settings that all workers, by their names, have; raises EdgespecError where they differ."""
    first, *others = infos
    for name in others:
        _compare(first, infos[first], name, infos[name])
    return dict(infos[first].settings)


def check_joining(name: str, info: WorkerInfo, run_by: str, run: WorkerInfo) -> None:
    """Raise EdgespecError for a worker that would write other texts than those of the run."""
    _compare(run_by, run, name, info)


def _compare(first: str, one: WorkerInfo, second: str, other: WorkerInfo) -> None:
    facts = [{**info.versions, **info.settings} for info in (one, other)]
    found = [name for name in {**facts[0], **facts[1]} if facts[0].get(name) != facts[1].get(name)]
    if found:
        here, there = ("; ".join(f"{name} {_shown(values.get(name))}" for name in found[:5]) for values in facts)
        raise EdgespecError("E_WORKER", f"{second} would not write what {first} writes: {there}, not {here}.", FIX)


def _shown(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
