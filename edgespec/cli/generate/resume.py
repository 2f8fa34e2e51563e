"""Going on with an output file: which prompts it has answered, and whether they belong to this run.

A run that was killed leaves a file of whole records, the last one perhaps torn; each record says what it was made with.
Records that are written in the prompts' order wait for those before them in a second file, read like the first.
"""

import datetime
import hashlib
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from edgespec.chat.picture_parts import sources_of
from edgespec.chat.template_date import parse_day
from edgespec.cli.console import named
from edgespec.cli.generate.formats import Entry, read_entry
from edgespec.cli.generate.output_file import OutputFile, replaced_file
from edgespec.cli.options.files import waiting_path
from edgespec.cli.prompts.rows import PromptRow, with_digests
from edgespec.errors import EdgespecError

CONTEXT, CHAT_TEMPLATE, TOKENIZER, STOP_TOKENS, DAY = (
    "context_tokens", "chat_template", "tokenizer", "stop_tokens", "day"
)  # fmt: skip
Line: TypeAlias = tuple[Entry, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results that an output file holds."""

    path: Path
    lines: tuple[Line, ...]
    waiting: tuple[Line, ...]  # for records before them, in a file of their own
    num_whole_bytes: int  # up to a torn last line
    is_torn: bool
    ends_line: bool  # the last record is followed by a line's end

    @property
    def entries(self) -> list[Entry]:
        """Return what all lines say."""
        return [entry for entry, _ in (*self.lines, *self.waiting)]

    @property
    def done(self) -> set[str]:
        """Return the ids that need not be run again."""
        return {entry.id for entry in self.entries if not entry.failed}

    @property
    def failed(self) -> set[str]:
        """Return the ids that failed and are to be run again."""
        return {entry.id for entry in self.entries if entry.failed} - self.done

    @property
    def seed(self) -> int | None:
        """Return the seed that the run began with; None where it is not known."""
        return next((entry.seed for entry in self.entries if entry.seed is not None), None)

    @property
    def day(self) -> datetime.date | None:
        """Return the day that the run's chat template was given; None where it is not known."""
        configs = [entry.record.get("config") for entry in self.entries]
        days = [parse_day(config.get(DAY)) for config in configs if isinstance(config, dict)]
        return next((day for day in days if day is not None), None)

    def made_otherwise(self, config: dict[str, Any]) -> Entry | None:
        """Return a result that was made with other settings; None where there is none."""
        own = config_hash(config)
        return next((entry for entry in self.entries if not entry.failed and entry.config_hash != own), None)


def config_hash(config: dict[str, Any]) -> str:
    """Return eight digits that two configurations share only if they are the same."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]


def read_results(path: Path, format_name: str) -> Results:
    """Read the results of a file, which may be missing; raises EdgespecError for a bad line before the last."""
    data, lines, whole = _read_lines(path, format_name)
    written = {entry.id for entry, _ in lines if not entry.failed}
    waiting = _read_lines(waiting_path(path), format_name)[1]
    return Results(
        path=path,
        lines=tuple(lines),
        waiting=tuple(line for line in waiting if line[0].id not in written),
        num_whole_bytes=whole,
        is_torn=whole < len(data.rstrip()),
        ends_line=data[:whole].endswith(b"\n"),
    )


def _read_lines(path: Path, format_name: str) -> tuple[bytes, list[Line], int]:
    """Return a file's content, its records, and the bytes up to a torn last line."""
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise EdgespecError(
            "E_OUTPUT", f"cannot read '{path}' ({error.strerror}).", "Choose a file that can be read."
        ) from error
    found: list[Line] = []
    whole = end = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        end = min(end + len(line) + 1, len(data))
        entry = read_entry(format_name, line)
        if entry is not None:
            found.append((entry, line))
            whole = end
        elif line.strip() and any(later.strip() for later in lines[number:]):
            fix = "Give the --format that the file was written in, remove the line, or start again with --overwrite."
            raise EdgespecError("E_RESUME", f"line {number} of '{path}' is no {format_name} record.", fix)
    return data, found, whole


def check_same_run(results: Results, rows: list[PromptRow], config: dict[str, Any], *, truncate: str = "skip") -> None:
    """Raise EdgespecError where results were made of other prompts or with other settings, naming what differs.

    `rows` are all of the input, selected or not.
    """
    fix = "Run with what they were made with, start again with --overwrite, or mix them with --force."
    kept = [entry for entry in results.entries if not entry.failed]
    other = results.made_otherwise(config)
    if other is not None:
        differences = _differences(other.record.get("config"), config)
        raise EdgespecError("E_RESUME", f"'{results.path}' was made with other settings: {differences}.", fix)
    cut = {(entry.record.get("truncated") or {}).get("side", truncate) for entry in kept} - {truncate}
    if cut:
        raise EdgespecError("E_RESUME", f"'{results.path}' has prompts cut by --truncate {named(sorted(cut))}.", fix)
    by_id = {row.id: row for row in rows}
    strangers = [entry.id for entry in kept if entry.id not in by_id]
    if strangers:
        raise EdgespecError(
            "E_RESUME", f"'{results.path}' has results of prompts that are not in the input: {named(strangers)}.", fix
        )
    found = [(entry.id, _change(entry, _knowing_pictures(by_id[entry.id]))) for entry in kept]
    changes = [f"'{name}' ({change})" for name, change in found if change]
    if changes:
        raise EdgespecError("E_RESUME", f"prompts have changed since '{results.path}': {named(changes)}.", fix)


def keep_finished(
    file: OutputFile, results: Results, again: set[str], order: Sequence[str] | None = None
) -> dict[str, str]:
    """Make the file ready to be continued: without a torn last line, and without failed rows that run `again`.

    With an `order` of ids, records after the first prompt that is to be run wait for it: they are returned by their
    ids, and are in the file of those that wait. Raises EdgespecError.
    """
    kept = [line for line in (*results.lines, *results.waiting) if not (line[0].failed and line[0].id in again)]
    held: list[Line] = []
    if order is not None:
        position = {name: index for index, name in enumerate(order)}
        kept.sort(key=lambda line: position.get(line[0].id, -1))
        first = min((position[name] for name in again), default=math.inf)
        held = [line for line in kept if position.get(line[0].id, -1) > first]
        kept = kept[: len(kept) - len(held)]
    try:
        if held:  # first, so that each record is in one of the files at any time
            with replaced_file(waiting_path(file.path)) as waiting:
                waiting.write(_joined(held))
        if kept != list(results.lines):
            file.rewrite(_joined(kept))
        elif results.is_torn or (results.lines and not results.ends_line):
            file.cut(results.num_whole_bytes, end=b"\n" if results.lines and not results.ends_line else b"")
        if not held:
            waiting_path(file.path).unlink(missing_ok=True)
    except OSError as error:
        raise EdgespecError(
            "E_OUTPUT", f"cannot write '{results.path}' ({error.strerror}).", "Free some space, or check its rights."
        ) from error
    return {entry.id: line.decode() + "\n" for entry, line in held}


def command_to_continue(seed: int) -> str:
    """Return the command line of this process, with --resume and the seed in use: no record may hold that yet."""
    words = ["edgespec", *(word for word in sys.argv[1:] if word != "--overwrite")]
    words += [] if "--resume" in words else ["--resume"]
    words += [] if any(word.partition("=")[0] == "--seed" for word in words) else ["--seed", str(seed)]
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


def _joined(lines: Sequence[Line]) -> bytes:
    return b"".join(line + b"\n" for _, line in lines)


def _differences(before: Any, now: dict[str, Any]) -> str:
    """Return the settings that differ, with both values, where the format keeps them."""
    if not isinstance(before, dict):
        return "its format does not say which (--format jsonl does)"
    found = [
        f"{_NAMES.get(name, name)} {_shown(before, name)} there, {_shown(now, name)} here"
        for name in [*now, *(name for name in before if name not in now)]
        if before.get(name) != now.get(name)
    ]
    return named(found) if found else "its records contradict themselves"


_NAMES = {CHAT_TEMPLATE: "chat template", TOKENIZER: "tokenizer", STOP_TOKENS: "stop tokens"}


def _shown(values: dict[str, Any], name: str) -> str:
    text = json.dumps(values[name], ensure_ascii=False) if name in values else "default"
    return text if len(text) <= 60 else text[:57] + "..."


def _knowing_pictures(row: PromptRow) -> PromptRow:
    """Return a row with the digests of its pictures, also where it is not to be run; raises EdgespecError."""
    if row.image_digests or row.fault is not None:
        return row
    return with_digests(row, [source.known().sha256 for source in sources_of(row.messages)])


def _change(entry: Entry, row: PromptRow) -> str | None:
    """Say which part of the prompt is not what the result was made of."""
    if entry.prompt_hash is not None:
        return None if entry.prompt_hash == row.digest else "prompt or settings"
    before = entry.record
    keys = ["prompt"] if before.get("prompt") != row.as_written else []
    keys += ["images"] if before.get("images", []) != list(row.image_digests) else []
    old, new = before.get("row_settings"), json.loads(json.dumps(row.settings.set_values()))
    if not isinstance(old, dict):
        return "settings"
    keys += [name for name in [*new, *(name for name in old if name not in new)] if old.get(name) != new.get(name)]
    return ", ".join(keys) or None
