"""The options that spread a run over the machines of a Ray cluster."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgespec.cli.generate.options import OutputOptions
from edgespec.cli.options.group import Command, with_options
from edgespec.cli.options.numbers import WholeRange

AUTO = "auto"
RAY_HELP = (
    "Spread the rows over a Ray cluster: HOST:PORT, auto (the one this machine belongs to, as without a value), or "
    "local (this machine alone)."
)
WORKERS_HELP = "Workers, each with a pair of its own. [default: one a GPU, or one a machine]"
RESOURCES_HELP = "What each worker has of its machine. [default: gpu=1 where there are any, else cpu=1]"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The workers that a run is spread over."""

    address: str
    num_workers: int | None
    resources: Mapping[str, float] | None


def ray_options(function: Command) -> Command:
    """Add the options of the cluster and its workers, which are handed on as `workers`; None: this process alone."""

    @functools.wraps(function)
    def call(*, ray: str | None, num_workers: int | None, resources: Mapping[str, float] | None, **others: Any) -> Any:
        if ray is None and (num_workers is not None or resources is not None):
            raise click.UsageError("--workers and --resources belong to --ray.")
        asked = None if ray is None else WorkerOptions(address=ray, num_workers=num_workers, resources=resources)
        return function(workers=asked, **others)

    options = [
        click.option("--ray", is_flag=False, flag_value=AUTO, metavar="[ADDRESS|local]", help=RAY_HELP),
        click.option("--workers", "num_workers", type=WholeRange(min=1), metavar="N", help=WORKERS_HELP),
        click.option("--resources", callback=_resources, metavar="cpu=4,gpu=1", help=RESOURCES_HELP),
    ]
    return with_options(call, options)


def check_options(out: OutputOptions, prompt_cache: Path | None) -> None:
    """Raise UsageError for what a run on many workers cannot do."""
    if out.path is None:
        raise click.UsageError("--ray writes its records to a file: give -o FILE.")
    if out.live_text:
        raise click.UsageError("--stream shows one text after the other; with --ray many are under way.")
    if prompt_cache is not None:
        raise click.UsageError("--prompt-cache is a file of one process: leave it out with --ray.")


def _resources(_context: click.Context, _parameter: click.Parameter, value: str | None) -> dict[str, float] | None:
    from edgespec.distributed.resources import parse_resources

    return None if value is None else parse_resources(value)
