"""Prompt files: one text, lines, JSONL rows or a JSON array; read and encoded before a model is loaded."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import counted
from edgespec.cli.prompts.rows import MessageFields, PromptRow, parse_row, text_row
from edgespec.errors import EdgespecError
from edgespec.inputs import parse_json
from edgespec.text.chat_template import Message, plain_ids, template_ids

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair

JSONL_SUFFIXES = {".jsonl", ".ndjson"}
MAX_SHOWN = 60  # characters of what was given for a file
ROW_SUFFIXES = {*JSONL_SUFFIXES, ".json"}
KIND_NAMES = {
    "text": "plain text",
    "line": "one a line",
    "string": "strings",
    "pair": "[id, text] pairs",
    "prompt": "single prompts",
    "messages": "messages",
    "turns": "turns",
    "mt-bench": "MT-Bench turns",
    "batch": "OpenAI batch messages",
    "completion": "OpenAI batch prompts",
}


def read_prompts(source: str, *, lines: bool) -> list[PromptRow]:
    """Read the prompts of a file, or of stdin for '-'; raises EdgespecError with the line's number."""
    suffix = "" if source == "-" else Path(source).suffix.lower()
    try:
        text = read_text(source)
    except EdgespecError as error:
        if error.code != "E_FILE_NOT_FOUND":
            raise
        shown = source if len(source) <= MAX_SHOWN else f"{source[:MAX_SHOWN]}..."
        what = error.what.replace(source, shown)
        looks_like_a_file = Path(shown).suffix and " " not in shown
        also = "" if looks_like_a_file else f" A prompt itself: -p {shlex.quote(shown)}"
        raise EdgespecError(error.code, what, error.fix + also) from error
    if lines and holds_rows(source):
        raise EdgespecError("E_SETTING", f"--lines does not apply to '{source}'.", "Leave it out for JSON.")
    if suffix == ".json":
        rows = [_checked_row(value, f"row {number}") for number, value in enumerate(_read_array(text, source), 1)]
    elif suffix in JSONL_SUFFIXES:
        rows = [
            _checked_row(_parse(line, f"line {number}", "Write one JSON object a line."), f"line {number}")
            for number, line in _numbered(text)
        ]
    elif lines:
        rows = [text_row(line, f"line {number}", kind="line") for number, line in _numbered(text)]
    else:
        # One newline at the end belongs to the file, not to the prompt.
        rows = [text_row(text.removesuffix("\n"), f"'{source}'", kind="text")] if text.strip() else []
    if not rows:
        raise EdgespecError("E_PROMPT_EMPTY", f"'{source}' holds no prompt.", "Put some text into it.")
    return numbered_rows(rows)


def holds_rows(source: str | None) -> bool:
    """Return whether a source of prompts is a file of JSON rows, and not of text."""
    return source is not None and Path(source).suffix.lower() in ROW_SUFFIXES


def numbered_rows(rows: list[PromptRow]) -> list[PromptRow]:
    """Give every row its index and an id of its own; raises EdgespecError where two have the same id."""
    taken = {row.id for row in rows}
    found = [
        # Rows without an id get their index, or a name with it where a row has that for its id.
        replace(row, index=index, id=row.id or (str(index) if str(index) not in taken else f"row-{index}"))
        for index, row in enumerate(rows)
    ]
    check_unique(found)
    return found


def check_unique(rows: Iterable[PromptRow]) -> None:
    """Raise EdgespecError where two rows have the same id."""
    first: dict[str, str] = {}
    for row in rows:
        if row.id in first:
            raise EdgespecError(
                "E_PROMPT_INVALID",
                f"{row.where} has id '{row.id}', as {first[row.id]} has.",
                "Give each row an id of its own.",
            )
        first[row.id] = row.where


def describe(rows: list[PromptRow]) -> str:
    """Describe what was read: 'prompts: 80 rows, MT-Bench turns (160 turns)'."""
    kinds = Counter(row.kind for row in rows)
    if set(kinds) == {"text"}:
        return "prompts: 1 text"
    names = [KIND_NAMES[kind] if len(kinds) == 1 else f"{count} of {KIND_NAMES[kind]}" for kind, count in kinds.items()]
    num_turns = sum(row.num_turns for row in rows)
    turns = f" ({counted(num_turns, 'turn')})" if {"turns", "mt-bench"} & set(kinds) else ""
    return f"prompts: {counted(len(rows), 'row')}, {', '.join(names)}{turns}"


def encode_prompts(pair: ModelPair, rows: list[PromptRow], *, raw: bool, system: str | None = None) -> list[list[int]]:
    """Encode every row up to its first answer, through the chat template where the model has one."""
    return [encode_turn(pair, row, raw=raw, system=system) for row in rows]


def encode_turn(
    pair: ModelPair,
    row: PromptRow,
    answers: tuple[Message, ...] = (),
    *,
    raw: bool,
    system: str | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Encode a row up to its next answer; raises EdgespecError that names the row, and for far more than `max_tokens`.

    Without a template the messages are one text, as in a chat without one: see `edgespec.text.chat_template`.
    """
    tokenizer = pair.tokenizer
    said = _with_system(row, system)
    exchanges = list(zip(answers, row.follow_ups, strict=False))
    if tokenizer.chat_template and not raw:
        messages = [dict(message) for message in said]
        for answer, question in exchanges:
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": question}]
        try:
            ids = template_ids(tokenizer, messages, max_tokens=max_tokens)
        except EdgespecError as error:
            if error.code == "E_CONTEXT":
                raise
            raise EdgespecError(error.code, f"{row.where}: {error.what}", error.fix) from error
    else:
        # Of the roles only an answer's place differs: behind its question, not below it.
        text = [
            Message(role="assistant" if message["role"] == "assistant" else "user", content=message["content"])
            for message in said
            if message["content"]
        ]
        for answer, question in exchanges:
            text += [answer, Message(role="user", content=question)]
        ids = plain_ids(tokenizer, text, max_tokens=max_tokens)
    if not ids:
        raise EdgespecError("E_PROMPT_EMPTY", f"the prompt of {row.where} has no tokens.", "Remove it.")
    if max(ids) >= pair.vocab:
        raise EdgespecError(
            "E_TOKENIZER",
            f"{row.where} has token id {max(ids)}, and the model knows {pair.vocab} tokens.",
            "Use the tokenizer that belongs to the model.",
        )
    return ids


def read_text(source: str, *, what: str = "a text or JSONL file, or - for stdin") -> str:
    """Read a file's text, or stdin's for '-', without byte order mark and carriage returns; raises EdgespecError."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except FileNotFoundError as error:
        raise EdgespecError("E_FILE_NOT_FOUND", f"there is no file '{source}'.", f"Give {what}.") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise EdgespecError("E_FILE_NOT_FOUND", f"cannot read '{source}' ({reason}).", f"Give {what}.") from error
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise EdgespecError(
            "E_PROMPT_INVALID", f"'{source}' line {line} is not UTF-8.", "Save the file as UTF-8."
        ) from error


def _with_system(row: PromptRow, system: str | None) -> tuple[MessageFields, ...]:
    """Return the messages behind the row's own system prompt, or the run's where the row has none."""
    content = row.settings.system if row.settings.system is not None else system
    has_own = any(message["role"] == "system" for message in row.messages)
    return row.messages if has_own or not content else ({"role": "system", "content": content}, *row.messages)


def _numbered(text: str) -> list[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _read_array(text: str, source: str) -> list[Any]:
    if not text.strip():
        return []
    fix = "Write an array of rows, strings or [id, text] pairs; name a file of one object a line .jsonl."
    found = _parse(text, f"'{source}'", fix)
    if not isinstance(found, list):
        raise EdgespecError("E_PROMPT_INVALID", f"'{source}' is JSON, and no array.", fix)
    return found


def _parse(text: str, where: str, fix: str) -> Any:
    try:
        return parse_json(text, is_strict=True)
    except json.JSONDecodeError as error:
        # A row's own line is in `where`; within it there is one.
        place = (
            f"at column {error.colno}" if where.startswith("line ") else f"at line {error.lineno}, column {error.colno}"
        )
        raise EdgespecError("E_PROMPT_INVALID", f"{where} is not JSON: {error.msg.lower()} {place}.", fix) from error
    except ValueError as error:
        raise EdgespecError("E_PROMPT_INVALID", f"{where} is not JSON ({error}).", fix) from error


def _checked_row(value: Any, where: str) -> PromptRow:
    """Return the row if it can be written as JSON again; raises EdgespecError for half a surrogate pair or 1e999."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise EdgespecError(
            "E_PROMPT_INVALID", f"{where} holds what cannot be written ({error}).", "Correct the row."
        ) from error
    return parse_row(value, where)
