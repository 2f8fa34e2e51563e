"""The output file of a run: what may be written over, what is continued, and the order of its records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from edgespec.cli.generate.in_order import InOrder
from edgespec.cli.generate.options import OutputOptions
from edgespec.cli.generate.prepare import Prompts
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.resume import Results, keep_finished, read_results
from edgespec.cli.generate.sinks import OutputFile, Sink, StandardOutput
from edgespec.cli.options.files import waiting_path
from edgespec.errors import EdgespecError

IN_ORDER = ("text", "specbench")  # formats whose readers go by a result's place


def take_output(
    options: OutputOptions, format_name: str, num_selected: int, stack: ExitStack
) -> tuple[OutputFile | None, Results | None]:
    """Open the output file, and read what a run continues, which no other run can change from now on.

    Raises EdgespecError where it cannot be written, or holds what nobody gave up. A dry run makes and locks no file.
    """
    if options.path is None:
        return None, None
    _check_path(options.path, resume=options.resume)
    file = None
    if not options.dry_run:
        file = OutputFile(options.path, overwrite=options.overwrite, has_ids=format_name != "text")
        stack.callback(file.close)
    if options.resume:
        return file, read_results(options.path, format_name)
    if not options.overwrite:
        _refuse_results(options.path, format_name, num_selected)
    return file, None


def _check_path(path: Path, *, resume: bool) -> None:
    """Raise EdgespecError where the output file cannot be written."""
    if path.is_dir():
        raise EdgespecError("E_OUTPUT", f"'{path}' is a folder.", "Name a file in it.")
    if not path.parent.is_dir():
        raise EdgespecError("E_OUTPUT", f"there is no folder '{path.parent}' to write in.", "Make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EdgespecError("E_OUTPUT", f"'{path}' cannot be written.", "Choose a file that can be.")
    if resume and path.exists() and not path.is_file():
        raise EdgespecError("E_OUTPUT", f"'{path}' is no file to go on with.", "Leave out --resume.")


def _refuse_results(path: Path, format_name: str, num_selected: int) -> None:
    """Raise EdgespecError for an output file that is not empty, or records that wait for some before them."""
    if not any(file.is_file() and file.stat().st_size for file in (path, waiting_path(path))):
        return
    try:
        found: Results | None = read_results(path, format_name)
    except EdgespecError:
        found = None  # something else's file
    if found is None or not found.entries:
        raise EdgespecError(
            "E_OUTPUT_EXISTS", f"'{path}' exists and is not empty.", "Choose another file, or give --overwrite."
        )
    raise EdgespecError(
        "E_OUTPUT_EXISTS",
        f"'{path}' has {len(found.done)} of {num_selected} results.",
        "Give --resume to go on with it, or --overwrite.",
    )


def open_output(
    prompts: Prompts, requests: Sequence[Request], options: OutputOptions, format_name: str, stack: ExitStack
) -> tuple[Sink, InOrder | None]:
    """Return what records go to and the order in which they do, without what is run again; raises EdgespecError."""
    to_run = [request.row.id for request in requests]
    is_ordered = options.ordered or format_name in IN_ORDER
    if prompts.file is None:
        stdout = StandardOutput()
        return stdout, InOrder(stdout, None, to_run) if is_ordered else None
    order = [row.id for row in prompts.all]
    held: dict[str, str] = {}
    sink = prompts.file
    if prompts.results is not None:
        held = keep_finished(sink, prompts.results, set(to_run), order if is_ordered else None)
    if not is_ordered:
        return sink, None
    waiting = None
    if sink.can_resume:
        waiting = OutputFile(waiting_path(sink.path), overwrite=prompts.results is None)
        stack.callback(waiting.close)
    coming = {*to_run, *held}
    return sink, InOrder(sink, waiting, [name for name in order if name in coming], held)


def begin_output(output: tuple[Sink, InOrder | None], options: OutputOptions) -> None:
    """Drop what is to be overwritten: nothing can be refused from here on."""
    sink, in_order = output
    sink.begin()
    if in_order is not None:
        in_order.begin()
    elif options.overwrite and options.path is not None:
        waiting_path(options.path).unlink(missing_ok=True)
