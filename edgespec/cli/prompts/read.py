"""Prompt files: one text, lines, JSONL rows or a JSON array; read and encoded before a model is loaded."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.chat.chat_template import Message, message_fields, plain_ids, template_ids
from edgespec.chat.continued import goes_on
from edgespec.chat.picture_parts import sources_of
from edgespec.chat.picture_prompt import Encoded, ids_of, messages_prompt, text_prompt
from edgespec.chat.rendering import named
from edgespec.cli.console import counted
from edgespec.cli.prompts.row_settings import typed_cells
from edgespec.cli.prompts.row_tools import template_values
from edgespec.cli.prompts.rows import SYSTEM_ROLES, MessageFields, PromptRow, parse_row, text_row
from edgespec.cli.prompts.source import (
    PARQUET,
    decoded,
    form_by_content,
    form_by_name,
    parquet_rows,
    read_bytes,
    row_lines,
    table_rows,
)
from edgespec.errors import EdgespecError
from edgespec.validation import parse_json

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair

MAX_SHOWN = 60  # characters of a name that is no file
TEXT_FILE = "a text or JSONL file, or - for stdin"
CONTENTS = {"jsonl": "a JSON object a line", "json": "a JSON array of objects"}
OF_ONE_ROW = ("E_CONTEXT", "E_PICTURE", "E_FILE_NOT_FOUND")  # codes of faults of a row: the others are run
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
    "response": "OpenAI batch responses",
    "completion": "OpenAI batch prompts",
    "fault": "OpenAI batch requests that are not run",
}


def read_prompts(
    source: str, *, lines: bool = False, input_format: str = "auto", say: Callable[[str], None] | None = None
) -> list[PromptRow]:
    """Read the prompts of a file, or of stdin for '-'; raises EdgespecError with the line's number.

    `input_format` is one of INPUT_FORMATS, and `lines` is that one. Where the content decides, that is said.
    """
    data = _read(source)
    input_format = "lines" if lines else input_format
    named = "parquet" if data.startswith(PARQUET) else form_by_name(source)
    if input_format == "lines" and named in {"jsonl", "json", "parquet"}:
        what = f"--lines does not apply to '{source}', which holds rows."
        raise EdgespecError("E_SETTING", what, "Leave it out.")
    named = named if input_format == "auto" else input_format
    text = "" if named == "parquet" else decoded(data, source)
    found = _format(text, named, source, say) if input_format in {"auto", "lines"} else named
    try:
        rows = _rows(text, data, found, source)
    except EdgespecError as error:
        if found == named or named != "text":
            raise
        raise EdgespecError(error.code, error.what, f"{error.fix} Or --input-format text: it is one prompt.") from error
    if not rows:
        raise EdgespecError("E_PROMPT_EMPTY", f"'{source}' holds no prompt.", "Put some text into it.")
    return numbered_rows(rows)


def _format(text: str, named: str, source: str, say: Callable[[str], None] | None) -> str:
    """Return the format of a text that is `named` so, by its content where that is JSON rows; says so."""
    found = form_by_content(text) if named in {"text", "lines", "jsonl", "json"} else None
    if found is None or found == named:
        return named
    if say is not None and named == "lines":
        say(f"'{source}' holds {CONTENTS[found]}: --lines makes each line a text, --input-format {found} reads rows")
    elif say is not None:
        say(f"'{source}' holds {CONTENTS[found]}, and is read as rows; --input-format {named} does not")
    return named if named == "lines" else found


def _read(source: str) -> bytes:
    try:
        return read_bytes(source, what=TEXT_FILE)
    except EdgespecError as error:
        if error.code != "E_FILE_NOT_FOUND":
            raise
        shown = source if len(source) <= MAX_SHOWN else f"{source[:MAX_SHOWN]}..."
        what = error.what.replace(source, shown)
        looks_like_a_file = Path(shown).suffix and " " not in shown
        also = "" if looks_like_a_file else f" A prompt itself: -p {shlex.quote(shown)}"
        raise EdgespecError(error.code, what, error.fix + also) from error


def _rows(text: str, data: bytes, input_format: str, source: str) -> list[PromptRow]:
    """Return the rows of a source in one of INPUT_FORMATS but 'auto'; raises EdgespecError."""
    if input_format == "text":
        # One newline at the end belongs to the file, not to the prompt.
        return [text_row(text.removesuffix("\n"), f"'{source}'", kind="text")] if text.strip() else []
    if input_format == "lines":
        return [text_row(line, f"line {number}", kind="line") for number, line in _numbered(text)]
    if input_format == "jsonl":
        return [
            _checked_row(_parse(line, f"line {number}", "Write one JSON object a line."), f"line {number}", source)
            for number, line in row_lines(text)
        ]
    if input_format == "json":
        values = _read_array(text, source)
    elif input_format == "parquet":
        values = parquet_rows(data, source)
    else:
        values = [
            typed_cells(row)
            for row in table_rows(text, delimiter={"csv": ",", "tsv": "\t"}[input_format], source=source)
        ]
    return [_checked_row(value, f"row {number}", source) for number, value in enumerate(values, 1)]


def holds_rows(rows: Iterable[PromptRow]) -> bool:
    """Return whether some of the prompts are rows, and not of text."""
    return any(row.kind not in {"text", "line"} for row in rows)


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
            what = f"{row.where} has id '{row.id}', as {first[row.id]} has."
            raise EdgespecError("E_PROMPT_INVALID", what, "Give each row an id of its own.")
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


def encode_prompts(pair: ModelPair, rows: list[PromptRow], *, raw: bool) -> list[list[int]]:
    """Encode every row up to its first answer, through the chat template where the model has one.

    Raises EdgespecError for rows with pictures.
    """
    seeing = next((row for row in rows if row.sees), None)
    if seeing is not None:
        raise EdgespecError("E_PICTURE", f"{seeing.where} has pictures, and only words are read here.", "Leave it out.")
    return [ids_of(encode_turn(pair, row, raw=raw)) for row in rows]


def encode_turn(
    pair: ModelPair,
    row: PromptRow,
    answers: tuple[Message, ...] = (),
    *,
    raw: bool,
    system: str | None = None,
    max_tokens: int | None = None,
) -> Encoded:
    """Encode a row up to its next answer; raises EdgespecError that names the row, if its code is none of OF_ONE_ROW.

    It is also raised for far more than `max_tokens`.

    Without a template the messages are one text, as in a chat without one: see `edgespec.chat.chat_template`. A batch's
    completion is its prompt alone.
    """
    if row.fault is not None:
        raise EdgespecError(row.fault.code, f"{row.where}: {row.fault.what}", row.fault.fix)
    tokenizer = pair.tokenizer
    own_messages = row.messages if row.kind == "completion" else _with_system(row, system)
    exchanges = list(zip(answers, row.follow_ups, strict=False))
    if row.token_ids:
        ids = list(row.token_ids)
    elif tokenizer.chat_template and not raw and row.kind != "completion":
        messages = [dict(message) for message in own_messages]
        for answer, question in exchanges:
            messages += [message_fields(tokenizer, answer), {"role": "user", "content": question}]
        try:
            values = template_values(pair, row.settings)
            first = 1 + len(row.messages) - len(own_messages)
            goes = goes_on(messages, row.settings.continue_final_message)
            whole: Any = {"values": values, "first": first, "max_tokens": max_tokens, "continues": goes}
            if row.sees:
                return messages_prompt(pair, messages, **whole)
            ids = template_ids(tokenizer, messages, **whole)
        except EdgespecError as error:
            if error.code in OF_ONE_ROW:
                raise
            raise EdgespecError(error.code, f"{row.where}: {error.what}", error.fix) from error
    elif row.sees:
        if row.kind not in ("text", "prompt"):
            what = f"{row.where} has pictures in messages, which need a chat template."
            raise EdgespecError("E_CHAT_TEMPLATE", what, "Leave `raw` out, or give a `chat_template`.")
        return text_prompt(pair, row.prompt, sources_of(row.messages), max_tokens=max_tokens)
    else:
        _check_texts(row)
        # Of the roles only an answer's place differs: after its question, not below it.
        text = [
            Message(role="assistant" if message["role"] == "assistant" else "user", content=message["content"])
            for message in own_messages
            if message["content"]
        ]
        for answer, question in exchanges:
            text += [answer, Message(role="user", content=question)]
        ids = plain_ids(tokenizer, text, max_tokens=max_tokens)
    if not ids:
        raise EdgespecError("E_PROMPT_EMPTY", f"the prompt of {row.where} has no tokens.", "Remove it.")
    if max(ids) >= pair.vocab:
        what = f"{row.where} has token id {max(ids)}, and the model knows {pair.vocab} tokens."
        raise EdgespecError("E_TOKENIZER", what, "Use the tokenizer that belongs to the model.")
    return ids


def _check_texts(row: PromptRow) -> None:
    """Raise EdgespecError for a message that only calls tools: without a template it says nothing."""
    for number, message in enumerate(row.messages, 1):
        if not message["content"] and (message.get("tool_calls") or message.get("function_call")):
            what = (
                f"{row.where}: {named(number, message)} only calls tools, which does not reach a prompt of plain text."
            )
            raise EdgespecError("E_PROMPT_INVALID", what, "Use a `chat_template`, or leave that message out.")


def read_text(source: str, *, what: str = TEXT_FILE) -> str:
    """Read a file's text, or stdin's for '-', without byte order mark and carriage returns; raises EdgespecError."""
    return decoded(read_bytes(source, what=what), source)


def _with_system(row: PromptRow, system: str | None) -> tuple[MessageFields, ...]:
    """Return the messages after the row's own system prompt, or after the run's where the row has none."""
    content = row.settings.system if row.settings.system is not None else system
    has_own = any(message["role"] in SYSTEM_ROLES for message in row.messages)
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


def _checked_row(value: Any, where: str, source: str) -> PromptRow:
    """Return the row if it can be written as JSON again; raises EdgespecError for half a surrogate pair or 1e999."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: dates and bytes of a Parquet file
        raise EdgespecError(
            "E_PROMPT_INVALID", f"{where} holds what cannot be written ({error}).", "Correct the row."
        ) from error
    return parse_row(value, where, None if source == "-" else Path(source).parent)
