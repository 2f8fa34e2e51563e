"""A run on many workers: they are compared and given rows, and this process alone writes their records."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.cli.console import Console, DrawLines, counted
from edgespec.cli.ctrl_c import counting_presses, keeping_termination, raise_interrupt, stopping_notice
from edgespec.cli.generate.dry_run import work_note
from edgespec.cli.generate.options import GenerateOptions, PairOptions
from edgespec.cli.generate.prepare import Prompts, make_run_requests, report_ignored_settings, still_to_run
from edgespec.cli.generate.progress import Tally, WorkersProgress
from edgespec.cli.generate.record_output import open_output, write_records
from edgespec.cli.generate.records import RowRecord, Totals, error_record
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.resume import config_hash
from edgespec.cli.generate.worker import RowAnswer, RowPlan
from edgespec.distributed.cluster import check_places, connected, default_resources, default_workers, machines
from edgespec.distributed.dispatch import Dispatch, JobOutcome
from edgespec.distributed.ray_worker_pool import RayWorkerPool
from edgespec.distributed.worker import WorkerInfo
from edgespec.hub.names import WORDS
from edgespec.tree.settings import TreeOptions

STOPPING = "stopping: records of rows that have ended are kept"


def run_on_workers(console: Console, prompts: Prompts, options: GenerateOptions) -> int:
    """Run all prompts on a cluster's workers and return the exit status; raises EdgespecError."""
    workers, output_options = options.workers, options.output
    assert workers.address is not None
    with console.status("reading headers and prompts"):
        work = make_run_requests(console, prompts, options)
    report_ignored_settings(console, work.pair, prompts.selected, options.prompts)
    with ExitStack() as stack:
        line_width = console.width if console.is_terminal else None
        notices = () if console.quiet else (stopping_notice(STOPPING, line_width=line_width),)
        num_pressed = stack.enter_context(counting_presses(notices=notices, give_up=raise_interrupt))

        def check() -> None:
            if num_pressed():
                raise KeyboardInterrupt

        with console.status("connecting to the cluster"), keeping_termination():
            ray = stack.enter_context(connected(workers.address, num_workers=workers.num_workers))
        nodes = machines(ray)
        each = default_resources(nodes) if workers.resources is None else workers.resources
        num_workers = workers.num_workers or default_workers(nodes, each)
        check_places(nodes, each, num_workers)
        plan = RowPlan(
            pair_options=_anywhere(options.pair_options),
            settings=work.settings,
            needed=replace(work.needed, num_rows=-(-work.needed.num_rows // num_workers)),
        )
        pool: RayWorkerPool[Request, RowAnswer] = stack.enter_context(
            closing(RayWorkerPool(plan, num_workers=num_workers, resources=each, check=check))
        )
        with console.status(f"waiting for {counted(num_workers, 'worker')}"):
            infos, config = pool.read_infos()
        _say_infos(console, infos)
        # Pictures go as files, which are smaller than pixels.
        waiting = still_to_run(console, prompts, options, work, config)
        requests = [replace(request, pictures=None) for request in waiting]
        if output_options.dry_run:
            console.say(work_note(requests)[1])
            console.say("dry run: nothing was loaded or written")
            return 0
        output = open_output(prompts, requests, output_options, stack)
        if not requests:
            console.say("nothing to do")
            return 0
        pool.load()
        tally = Tally(requests)
        fields = {**next(iter(infos.values())).shared, "config": config, "config_hash": config_hash(config)}

        def answer(draw: DrawLines) -> Generator[RowRecord, None, None]:
            progress = WorkersProgress(console, tally, draw)
            dispatch = Dispatch(requests, pool, pool.names, log=console.say, on_exchange=progress.update)
            for number, outcome in enumerate(dispatch.run()):
                if not number:  # a worker has loaded: the file may be overwritten
                    output.begin()
                yield _answered(outcome, fields)

        return write_records(
            console,
            answer,
            tally,
            output,
            seed=work.settings.seed,
            shows_progress=True,
            fail_fast=output_options.fail_fast,
        )


def _answered(outcome: JobOutcome[Request, RowAnswer], fields: dict[str, Any]) -> RowRecord:
    """Return a row with its record: the worker's, or the error of the workers that were lost with it."""
    if outcome.value is not None:
        record, totals = outcome.value
        return RowRecord(request=outcome.job, record=record, totals=totals)
    assert outcome.error is not None
    return RowRecord(request=outcome.job, record=error_record(outcome.job, [], outcome.error, fields), totals=Totals())


def _say_infos(console: Console, infos: Mapping[str, WorkerInfo]) -> None:
    """Say how workers placed themselves; those that did alike are said once."""
    by_lines: dict[tuple[str, ...], list[str]] = {}
    for name, info in infos.items():
        by_lines.setdefault(tuple(info.lines), []).append(name)
    for lines, names in by_lines.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        for line in lines:
            console.say(f"{names[0]}{more}: {line}")


def _anywhere(pair_options: PairOptions) -> PairOptions:
    """Return the place with whole paths: a worker's own folder is another one."""
    own = pair_options.models
    places = {"target": own.target, "draft": own.draft, "tokenizer": own.tokenizer}
    models = replace(
        own,
        adapters=tuple(replace(one, path=one.path.absolute()) for one in own.adapters),
        draft_adapters=tuple(replace(one, path=one.path.absolute()) for one in own.draft_adapters),
        drafts=tuple(place if place in WORDS else place.absolute() for place in own.drafts),
        **{name: place if place is None or place in WORDS else place.absolute() for name, place in places.items()},
    )
    trees = pair_options.trees
    explicit = {name: value.absolute() if isinstance(value, Path) else value for name, value in trees.explicit.items()}
    profile = trees.profile if trees.profile in ("auto", "none") else str(Path(trees.profile).absolute())
    return replace(pair_options, models=models, trees=TreeOptions(explicit=explicit, profile=profile))
