"""Rows whose prompt fills the context: cut where --truncate says so, else found before the run begins.

What is cut is a row's longest message, at its beginning or its end; system prompt, template and other messages stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.chat.picture_parts import is_picture, text_of
from edgespec.chat.picture_prompt import ids_of
from edgespec.cli.generate.requests import EncodeTurn, Request, Side, Truncation, question_tokens, row_tokens
from edgespec.cli.prompts.rows import SYSTEM_ROLES, PromptRow
from edgespec.config import DEFAULT_NEW_TOKENS
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATE = ("left", "right", "skip", "fail")
MAX_TRIES = 8  # a text that was cut may have a few tokens more than were counted
FIX = "Shorten it, or give --truncate left (or right), which cuts its beginning (or its end)."


def fit(
    requests: list[Request], how: str, encode: EncodeTurn, tokenizer: PreTrainedTokenizerBase, max_context: int | None
) -> list[Request]:
    """Return the requests as they fit the context: cut, or with the fault that each has."""
    found = []
    for request in requests:
        if request.row.fault is not None:
            found.append(request)
            continue
        if how in {"left", "right"} and max_context is not None:
            request = _cut(request, "left" if how == "left" else "right", encode, tokenizer, max_context)
        try:
            if request.fault is not None:
                raise request.fault
            request = replace(request, needs=row_tokens(request, encode, max_context))
        except EdgespecError as error:
            if error.code != "E_CONTEXT":
                raise EdgespecError(error.code, f"{request.row.where}: {error.what}", error.fix) from error
            fix = FIX if request.truncated is None else "Shorten it: it has other messages than the one that was cut."
            request = replace(request, fault=EdgespecError(error.code, error.what, fix))
        found.append(request)
    return found


def _cut(
    request: Request, side: Side, encode: EncodeTurn, tokenizer: PreTrainedTokenizerBase, max_context: int
) -> Request:
    """Return the request with its longest message cut until its answers fit."""
    before = question_tokens(request, encode)
    for _ in range(MAX_TRIES):
        surplus = question_tokens(request, encode) - _room(request, max_context)
        row = _shortened(request.row, side, surplus, tokenizer) if surplus > 0 else request.row
        if row == request.row:
            break
        request = replace(request, row=row, ids=ids_of(encode(row, ())), pictures=None)
    dropped = before - question_tokens(request, encode)
    return replace(request, truncated=Truncation(side=side, dropped_tokens=dropped)) if dropped else request


def _room(request: Request, max_context: int) -> int:
    """Return the tokens that all questions may have: answers take what they may, at most half of the context."""
    new_tokens = request.max_new_tokens if request.max_new_tokens >= 0 else DEFAULT_NEW_TOKENS
    return max_context - min(new_tokens * request.row.num_turns, max_context // 2)


def _shortened(row: PromptRow, side: Side, num_tokens: int, tokenizer: PreTrainedTokenizerBase) -> PromptRow:
    """Return the row with its longest message cut by these tokens; unchanged where too little would be left of that."""
    if row.token_ids:
        ids = row.token_ids[num_tokens:] if side == "left" else row.token_ids[:-num_tokens]
        return replace(row, token_ids=ids) if ids else row
    texts = [text_of(message["content"]) if message["role"] not in SYSTEM_ROLES else "" for message in row.messages]
    texts += row.follow_ups
    index = max(range(len(texts)), key=lambda index: len(texts[index]))
    text = texts[index]
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if num_tokens >= len(places):
        return row
    # A token may be a part of a character, which goes as a whole.
    text = text[places[num_tokens - 1][1] :] if side == "left" else text[: places[-num_tokens][0]]
    if not text:
        return row
    if index >= len(row.messages):
        at = index - len(row.messages)
        return replace(row, follow_ups=(*row.follow_ups[:at], text, *row.follow_ups[at + 1 :]))
    content = row.messages[index]["content"]
    pictures = [part for part in content if is_picture(part)] if isinstance(content, list) else []
    message = {**row.messages[index], "content": [*pictures, {"type": "text", "text": text}] if pictures else text}
    return replace(row, messages=(*row.messages[:index], message, *row.messages[index + 1 :]))
