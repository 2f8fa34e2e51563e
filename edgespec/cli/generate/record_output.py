"""The output of a run: a file that may be overwritten or continued, and the order of its records."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from edgespec.cli.console import Console, DrawLines, counted, print_error
from edgespec.cli.ctrl_c import SAID
from edgespec.cli.generate.formats import formatted
from edgespec.cli.generate.options import OutputOptions
from edgespec.cli.generate.output_file import OutputFile
from edgespec.cli.generate.prepare import Prompts
from edgespec.cli.generate.progress import Tally
from edgespec.cli.generate.records import RowRecord
from edgespec.cli.generate.requests import Request
from edgespec.cli.generate.resume import Results, command_to_continue, keep_finished, read_results
from edgespec.cli.options.files import waiting_path
from edgespec.cli.standard_streams import result_stream
from edgespec.errors import EXIT_RUNTIME, EXIT_SOME_FAILED, EdgespecError

IN_ORDER = ("text", "specbench")  # formats whose readers go by a result's place


def take_output(
    options: OutputOptions, num_selected: int, stack: ExitStack
) -> tuple[OutputFile | None, Results | None]:
    """Open the output file, and read what a run continues, which no other run can change from now on.

    Raises EdgespecError where it cannot be written, or holds results that may not be overwritten. A dry run makes and
    locks no file.
    """
    if options.path is None:
        return None, None
    _check_path(options.path, resume=options.resume)
    file = None
    if not options.dry_run:
        file = OutputFile(options.path, overwrite=options.overwrite, has_ids=options.settled_format != "text")
        stack.callback(file.close)
    if options.resume:
        return file, read_results(options.path, options.settled_format)
    if not options.overwrite:
        _refuse_results(options.path, options.settled_format, num_selected)
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
        found = None  # another program's file
    if found is None or not found.entries:
        raise EdgespecError(
            "E_OUTPUT_EXISTS", f"'{path}' exists and is not empty.", "Choose another file, or give --overwrite."
        )
    what = f"'{path}' has {len(found.done)} of {num_selected} results."
    raise EdgespecError("E_OUTPUT_EXISTS", what, "Give --resume to go on with it, or --overwrite.")


def open_output(
    prompts: Prompts, requests: Sequence[Request], options: OutputOptions, stack: ExitStack
) -> RecordOutput:
    """Return what records are written to, without those that are made again; raises EdgespecError."""
    to_run = [request.row.id for request in requests]
    is_ordered = options.ordered or options.settled_format in IN_ORDER
    file = prompts.file
    if file is None:
        return RecordOutput(None, options.settled_format, to_run if is_ordered else None)
    order = [row.id for row in prompts.all] if is_ordered else None
    held = {} if prompts.results is None else keep_finished(file, prompts.results, set(to_run), order)
    if order is None:
        return RecordOutput(file, options.settled_format)
    waiting = None
    if file.can_resume:
        waiting = OutputFile(waiting_path(file.path), overwrite=prompts.results is None)
        stack.callback(waiting.close)
    coming = {*to_run, *held}
    coming_order = [name for name in order if name in coming]
    return RecordOutput(file, options.settled_format, coming_order, waiting=waiting, held=held)


class RecordOutput:
    """Writes records to a file or to stdout, as they come or in the order of their prompts.

    A record that is early waits for those before it, meanwhile in a file of its own, so that a run that is killed loses
    none.
    """

    def __init__(
        self,
        file: OutputFile | None,
        format_name: str,
        order: Sequence[str] | None = None,
        *,
        waiting: OutputFile | None = None,
        held: Mapping[str, str] | None = None,
    ) -> None:
        """Write to the `file`, or to stdout; `order` has the ids of the records to come and of those `held`.

        The `waiting` file is for the records that wait; it has those that are `held` already.
        """
        self.format_name, self._file, self._waiting = format_name, file, waiting
        self._order = None if order is None else deque(order)  # of the records that are not written
        self._held = dict(held or {})
        self.num_written = 0

    @property
    def can_resume(self) -> bool:
        """Return whether a later run can go on with what is written."""
        return self._file is not None and self._file.can_resume

    @property
    def streams(self) -> bool:
        """Return whether answers are written to stdout as they are made, and records add nothing."""
        return self._file is None and self.format_name == "text"

    def begin(self) -> None:
        """Drop what is to be overwritten: nothing can be refused from here on."""
        if self._file is not None:
            self._file.begin()
            if self._waiting is None and self._file.overwrite:
                waiting_path(self._file.path).unlink(missing_ok=True)
        if self._waiting is not None:
            self._waiting.begin()

    def waiting_note(self) -> str:
        """Return what a run that is stopped says of the records that wait; nothing where there are none."""
        if not self._held:
            return ""
        waiting = f", {len(self._held)} more wait for those before them"
        return (
            f"{waiting}, in '{self._waiting.path}'" if self._waiting else f"{waiting} and are lost: -o FILE keeps them"
        )

    def write(self, name: str, text: str) -> None:
        """Take a prompt's record, and write all whose turn has come."""
        if self._order is None:
            self._put(text)
            return
        if self._waiting is not None and text and name != self._order[0]:
            self._waiting.write(text)
        self._held[name] = text
        while self._order and self._order[0] in self._held:
            self._put(self._held[self._order[0]])
            del self._held[self._order.popleft()]
        if self._waiting is not None and not self._order:
            self._waiting.clear()

    def _put(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text)
        else:
            result_stream().write(text)
            sys.stdout.flush()
        self.num_written += 1


def write_records(
    console: Console,
    answer: Callable[[DrawLines], Generator[RowRecord, None, None]],
    tally: Tally,
    output: RecordOutput,
    *,
    seed: int,
    shows_progress: bool,
    fail_fast: bool,
) -> int:
    """Write the record of every prompt and return the exit status; it is on the disk before the next step.

    `answer` returns the prompts as they are done, and may draw how it goes. A prompt that fails does not end the run,
    unless `fail_fast` says so. The `seed` is the run's, to go on with.
    """

    def say_stopped(why: str = "") -> None:
        written = f"{output.num_written} of {counted(tally.num_prompts, 'record')} written"
        console.say(f"stopped{why} with {written}{output.waiting_note()}")
        if output.can_resume:
            console.say(f"to go on: {command_to_continue(seed)}", breaks=False)

    with console.live_lines(is_shown=shows_progress) as draw, closing(answer(draw)) as answered:
        try:
            for one in answered:
                _write(one, tally, output)
                if one.failed and fail_fast:
                    say_stopped(" by --fail-fast")
                    return EXIT_RUNTIME
        except BaseException as error:  # also of a signal
            say_stopped()
            error.add_note(SAID)
            raise
    failed = f" · {tally.num_failed} failed" if tally.num_failed else ""
    console.say(f"{counted(tally.num_prompts, 'prompt')} · {tally.summary()}{failed}")
    return EXIT_SOME_FAILED if tally.num_failed else 0


def _write(one: RowRecord, tally: Tally, output: RecordOutput) -> None:
    """Write a record, and say the error that it holds."""
    text = "" if output.streams else formatted(output.format_name, one.request, one.record)
    output.write(one.request.row.id, text)
    tally.add(one.request, one.totals, failed=one.failed)
    if one.failed:
        error = one.record["error"]
        print_error(f"{one.request.row.where}: {error['message']}", error["fix"])
