"""Prompt files: one text, lines, or JSONL rows, all checked before a model is loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.context import check_ctx_size, new_token_limit
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.pair import ModelPair

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
    suffix = "" if source == "-" else Path(source).suffix.lower()
    if suffix == ".json":
        raise EdgespecError(
            "E_PROMPT_INVALID", f"'{source}' is a JSON document.", "Write one object a line and name the file .jsonl."
        )
    text = _read_text(source)
    if suffix in JSONL_SUFFIXES:
        if lines:
            raise EdgespecError("E_SETTING", f"--lines does not apply to '{source}'.", "Leave it out for JSONL.")
        rows = _with_ids([_parse_row(line, number) for number, line in _numbered(text)])
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
    _check_unique(rows)
    return rows


def encode_prompts(pair: ModelPair, rows: list[PromptRow], *, raw: bool) -> list[list[int]]:
    """Token ids of every prompt, through the chat template where the model has one."""
    tokenizer = pair.tokenizer
    vocab = pair.target.config.get_text_config(decoder=True).vocab_size
    encoded = []
    for row in rows:
        if tokenizer.chat_template and not raw:
            turns = [{"role": "user", "content": row.prompt}]
            try:
                ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
            except Exception as error:  # a template is a program of the model's, and may raise anything
                raise EdgespecError(
                    "E_CHAT_TEMPLATE", f"{row.where}: the model's chat template fails ({error}).", "Use --raw."
                ) from error
        else:
            ids = tokenizer.encode(row.prompt)
        if not ids:
            raise EdgespecError("E_PROMPT_EMPTY", f"the prompt of {row.where} has no tokens.", "Remove it.")
        if max(ids) >= vocab:
            raise EdgespecError(
                "E_TOKENIZER",
                f"{row.where} has token id {max(ids)}, and the model knows {vocab} tokens.",
                "Use the tokenizer that belongs to the model.",
            )
        encoded.append(list(ids))
    return encoded


def check_contexts(
    pair: ModelPair,
    rows: list[PromptRow],
    encoded: list[list[int]],
    max_new_tokens: int,
    *,
    ctx_size: int | None = None,
) -> int:
    """The longest text that the run may make; raises EdgespecError naming a prompt that does not fit.

    `ctx_size` is the context that was asked for, None for what the pair allows.
    """
    if ctx_size is not None:
        check_ctx_size(ctx_size, pair.max_context)
    max_context = ctx_size or pair.max_context
    longest = 0
    for row, ids in zip(rows, encoded, strict=True):
        try:
            limit, _ = new_token_limit(max_context, len(ids), max_new_tokens)
        except EdgespecError as error:
            raise EdgespecError(error.code, f"{row.where}: {error.what}", error.fix) from error
        longest = max(longest, len(ids) + limit)
    return longest


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


def _with_ids(rows: list[PromptRow]) -> list[PromptRow]:
    """Rows without an id get their index, or a name with it where a row has that for its id."""
    taken = {row.id for row in rows}
    return [
        row if row.id else replace(row, id=str(index) if str(index) not in taken else f"row-{index}")
        for index, row in enumerate(rows)
    ]


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
