"""The options that spread a run over the machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click

from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.record import option

AUTO = "auto"
RAY_HELP = (
    "Spread the rows over a Ray cluster: HOST:PORT, auto (the one this machine belongs to, as without a value), or "
    "local (this machine alone)."
)
WORKERS_HELP = "Start so many workers, each with a pair of its own. [default: one a GPU, or one a machine]"
RESOURCES_HELP = "Give each worker this of its machine. [default: gpu=1 where there are any, else cpu=1]"


def _resources(_context: click.Context, _parameter: click.Parameter, value: str | None) -> dict[str, float] | None:
    from edgespec.distributed.resources import parse_resources

    return None if value is None else parse_resources(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The workers that a run is spread over; without an address it has this process alone."""

    address: str | None = option("--ray", is_flag=False, flag_value=AUTO, metavar="[ADDRESS|local]", help=RAY_HELP)
    num_workers: int | None = option("--workers", type=WholeRange(min=1), metavar="N", help=WORKERS_HELP)
    resources: Mapping[str, float] | None = option(
        "--resources", callback=_resources, metavar="cpu=4,gpu=1", help=RESOURCES_HELP
    )

    def __post_init__(self) -> None:
        if self.address is None and (self.num_workers is not None or self.resources is not None):
            raise click.UsageError("--workers and --resources belong to --ray.")
