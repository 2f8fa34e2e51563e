"""The interface of a worker, wherever it runs: it gives its settings, loads, and takes jobs for answers.

What all workers would run with is compared before a weight is read, because they are to write the same texts.

A worker is asked by `exchange` alone once it has loaded: it takes jobs, works until some have ended or a moment has
passed, and returns. Two exchanges may wait for it at a time, so that it is never without jobs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from edgespec.errors import EdgespecError

Job = TypeVar("Job")
Value = TypeVar("Value")
JobIn = TypeVar("JobIn", contravariant=True)
MAX_SHOWN = 60  # characters of a value
FIX = "Give all machines the same models, edgespec and libraries; name `device` and `dtype` where machines are unlike."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker would run with, known before it reads a weight."""

    settings: Mapping[str, Any]  # all that shapes texts: models by their content, formats, sampling
    versions: Mapping[str, str]  # of edgespec, and of the libraries that compute
    num_texts: int  # under way at once
    shared: Mapping[str, Any]  # what all its answers say alike
    lines: Sequence[str] = ()  # for people: how it placed itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[Value]):
    """What became of a job."""

    number: int
    value: Value
    failed: bool = False
    may_succeed_elsewhere: bool = True  # where it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Generic[Value]):
    """What a worker reports at the end of an exchange."""

    answers: Sequence[Answer[Value]] = ()
    under_way: Mapping[str, int] = field(default_factory=dict)  # tokens of texts that go on, by their names
    num_tokens: int = 0  # of all its texts so far
    working_s: float = 0.0  # so far
    notes: Sequence[str] = ()  # for people


class Worker(Protocol[JobIn, Value]):
    """What runs in a process of its own."""

    def info(self) -> WorkerInfo:
        """Say what it would run with; raises EdgespecError where it cannot run at all."""

    def load(self, settings: Mapping[str, Any]) -> None:
        """Read the weights; answers say that they were made with these settings."""

    def exchange(self, jobs: Sequence[tuple[int, JobIn]], wait_s: float) -> Exchange[Value]:
        """Take jobs by their numbers, work until some have ended, or for a moment, and report it."""


class WorkerPlan(Protocol[JobIn, Value]):
    """How a worker is made: sent to where it runs."""

    def open(self, *, num_beside: int) -> Worker[JobIn, Value]:
        """Make the worker, which shares the free memory of its machine with `num_beside` others."""


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
