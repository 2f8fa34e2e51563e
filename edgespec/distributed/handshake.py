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
        check_joining(name, infos[name], first, infos[first])
    return dict(infos[first].settings)


def check_joining(name: str, info: WorkerInfo, first: str, first_info: WorkerInfo) -> None:
    """Raise EdgespecError for a worker that would write other texts than the first one of the run."""
    ours, theirs = ({**each.versions, **each.settings} for each in (first_info, info))
    found = [fact for fact in {**ours, **theirs} if ours.get(fact) != theirs.get(fact)]
    if found:
        here, there = ("; ".join(f"{fact} {_shown(facts.get(fact))}" for fact in found[:5]) for facts in (ours, theirs))
        raise EdgespecError("E_WORKER", f"{name} would not write what {first} writes: {there}, not {here}.", FIX)


def _shown(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
