"""Prompt files: one text, lines, or JSONL rows, all checked before a model is loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError

JSONL_SUFFIXES = {".jsonl", ".ndjson"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt and what came with it."""

    id: str
    prompt: str
    where: str  # for messages: 'line 3', or the file's name
    meta: dict[str, Any] = field(default_factory=dict)  # unknown keys, handed through to the result


def read_prompts(source: str, *, lines: bool) -> list[PromptRow]:
    """The prompts of a file, or of stdin for '-'; raises EdgespecError with the line's number."""
    text = _read_text(source)
    if source != "-" and Path(source).suffix.lower() in JSONL_SUFFIXES:
        if lines:
            raise EdgespecError("E_SETTING", f"--lines does not apply to '{source}'.", "Leave it out for JSONL.")
        rows = [_parse_row(line, number) for number, line in _numbered(text)]
    elif lines:
        rows = [
            PromptRow(id=str(index), prompt=line, where=f"line {number}")
            for index, (number, line) in enumerate(_numbered(text))
        ]
    else:
        # One newline at the end belongs to the file, not to the prompt.
        rows = [PromptRow(id="0", prompt=text.removesuffix("\n"), where=f"'{source}'")] if text.strip() else []
    if not rows:
        raise EdgespecError("E_PROMPT_EMPTY", f"'{source}' holds no prompt.", "Put some text into it.")
    if source != "-" and Path(source).suffix.lower() in JSONL_SUFFIXES:
        rows = [row if row.id else _with_index(row, index) for index, row in enumerate(rows)]
    _check_unique(rows)
    return rows


def _numbered(text: str) -> list[tuple[int, str]]:
    """Line numbers from 1, and the lines that are not blank."""
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _read_text(source: str) -> str:
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except FileNotFoundError as error:
        raise EdgespecError(
            "E_FILE_NOT_FOUND", f"there is no file '{source}'.", "Give a text or JSONL file, or - for stdin."
        ) from error
    except OSError as error:
        raise EdgespecError(
            "E_FILE_NOT_FOUND", f"cannot read '{source}' ({error.strerror}).", "Give a text or JSONL file."
        ) from error
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise EdgespecError(
            "E_PROMPT_INVALID", f"'{source}' line {line} is not UTF-8.", "Save the file as UTF-8."
        ) from error


def _parse_row(line: str, number: int) -> PromptRow:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text, and could not be written
    except (ValueError, RecursionError) as error:
        raise EdgespecError(
            "E_PROMPT_INVALID", f"line {number} is not JSON ({error}).", "Write one JSON object a line."
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise EdgespecError(
            "E_PROMPT_INVALID",
            f'line {number} has no "prompt" string.',
            'Write rows like {"id": "a", "prompt": "def main("}.',
        )
    if not row["prompt"]:
        raise EdgespecError("E_PROMPT_EMPTY", f"line {number} has an empty prompt.", "Remove the row.")
    identity = row.get("id")
    if identity is not None and not isinstance(identity, (str, int)):
        raise EdgespecError(
            "E_PROMPT_INVALID", f"line {number} has an id that is no string or number.", "Write the id as a string."
        )
    meta = {key: value for key, value in row.items() if key not in {"prompt", "id"}}
    return PromptRow(
        id="" if identity is None else str(identity), prompt=row["prompt"], where=f"line {number}", meta=meta
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _with_index(row: PromptRow, index: int) -> PromptRow:
    return PromptRow(id=str(index), prompt=row.prompt, where=row.where, meta=row.meta)


def _check_unique(rows: list[PromptRow]) -> None:
    first: dict[str, str] = {}
    for row in rows:
        if row.id in first:
            raise EdgespecError(
                "E_PROMPT_INVALID",
                f"{row.where} has id '{row.id}', as {first[row.id]} has.",
                "Give each row an id of its own.",
            )
        first[row.id] = row.where
