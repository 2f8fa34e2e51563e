"""The output file of a run: what may be written over, what is gone on with, and the order of its records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from edgespec.cli.generate.in_order import InOrder
from edgespec.cli.generate.options import AskedOutput
from edgespec.cli.generate.prepare import Prompts
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.resume import Results, keep_finished, read_results, waiting_path
from edgespec.cli.generate.sinks import OutputFile, Sink, StandardOutput
from edgespec.cli.log_file import current_log
from edgespec.errors import EdgespecError

IN_ORDER = ("text", "specbench")  # formats whose readers go by a result's place


def check_output(out: AskedOutput, source: str | None) -> None:
    """Raise EdgespecError where the output file would replace the prompts, or cannot be written."""
    path = out.path
    assert path is not None
    if path.is_dir():
        raise EdgespecError("E_OUTPUT", f"'{path}' is a folder.", "Name a file in it.")
    if source not in {None, "-"} and path.resolve() == Path(str(source)).resolve():
        raise EdgespecError("E_OUTPUT", f"'{path}' is the prompt file.", "Choose another file for the results.")
    if (log := current_log()) is not None and path.resolve() == log.resolve():
        raise EdgespecError("E_OUTPUT", f"'{path}' is the log.", "Choose another file for the results.")
    if not path.parent.is_dir():
        raise EdgespecError("E_OUTPUT", f"there is no folder '{path.parent}' to write in.", "Make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EdgespecError("E_OUTPUT", f"'{path}' cannot be written.", "Choose a file that can be.")
    if out.resume and path.exists() and not path.is_file():
        raise EdgespecError("E_OUTPUT", f"'{path}' is no file to go on with.", "Leave out --resume.")


def refuse_results(path: Path, format_name: str, num_wanted: int) -> None:
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
        f"'{path}' has {len(found.done)} of {num_wanted} results.",
        "Give --resume to go on with it, or --overwrite.",
    )


def open_output(
    prompts: Prompts, requests: Sequence[Request], out: AskedOutput, format_name: str, stack: ExitStack
) -> tuple[Sink, InOrder | None]:
    """Open what records go to, the order in which they do, and what of it is there already; raises EdgespecError."""
    to_run = [request.row.id for request in requests]
    is_ordered = out.ordered or format_name in IN_ORDER
    if out.path is None:
        stdout = StandardOutput()
        return stdout, InOrder(stdout, None, to_run) if is_ordered else None
    order = [row.id for row in prompts.all]
    held: dict[str, str] = {}
    if prompts.results is not None:
        OutputFile(out.path).close()  # refused where another run is at it
        held = keep_finished(prompts.results, set(to_run), order if is_ordered else None)
    sink = OutputFile(out.path, overwrite=out.overwrite)
    stack.callback(sink.close)
    if not is_ordered:
        return sink, None
    waiting = None
    if format_name != "text" and out.path.is_file():  # texts without ids are not gone on with
        waiting = OutputFile(waiting_path(out.path), overwrite=prompts.results is None)
        stack.callback(waiting.close)
    coming = {*to_run, *held}
    return sink, InOrder(sink, waiting, [name for name in order if name in coming], held)


def begin_output(output: tuple[Sink, InOrder | None], out: AskedOutput) -> None:
    """Drop what is to be overwritten: nothing can be refused from here on."""
    sink, in_order = output
    sink.begin()
    if in_order is not None:
        in_order.begin()
    elif out.overwrite and out.path is not None:
        waiting_path(out.path).unlink(missing_ok=True)
