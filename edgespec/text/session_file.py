"""Saved conversations: one JSON document whose messages have the form that other tools read, or a transcript.

The tokens of the answers are kept beside the messages: the same text can be written with other tokens than the
tokenizer would choose for it, and a session must go on from those that were written.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError
from edgespec.files import json_text, make_folder, written_whole
from edgespec.inputs import is_text, parse_json, shown
from edgespec.text.chat_template import Message
from edgespec.text.day import parse_day
from edgespec.text.token_text import CUT_CHARACTER, text_of_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = "edgespec.session/1"
MAX_BYTES = 256 << 20  # of a session: far more than any context holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """The content of a session's file."""

    model: str | None = None
    draft_model: str | None = None
    system: str | None = None
    day: datetime.date | None = None  # that the chat template was told
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the command that saved it
    messages: tuple[Message, ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> str:
        """Return the session as JSON."""
        content = {
            "schema": SCHEMA,
            "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "model": self.model,
            "draft_model": self.draft_model,
            "system": self.system,
            "day": None if self.day is None else self.day.isoformat(),
            "settings": dict(self.settings),
            "messages": [{"role": message.role, "content": message.content} for message in self.messages],
            "token_ids": [list(message.token_ids) for message in self.messages],
            "interrupted": [index for index, message in enumerate(self.messages) if message.is_interrupted],
            "stats": dict(self.stats),
        }
        return json_text(content, indent=1) + "\n"


def transcript(session: SavedSession) -> str:
    """Return the session for reading, in Markdown."""
    system = (Message(role="system", content=session.system),) if session.system else ()
    parts = [f"# {session.model}"]
    for message in (*system, *session.messages):
        note = " (interrupted)" if message.is_interrupted else ""
        parts.append(f"## {message.role}{note}\n\n{message.content.rstrip()}")
    return "\n\n".join(parts) + "\n"


def write_session(path: Path, content: str, *, overwrite: bool) -> None:
    """Write a file whole or not at all; raises EdgespecError for one that is there already."""
    if path.is_dir():
        raise EdgespecError("E_OUTPUT", f"'{path}' is a folder.", "Name a file in it.")
    if path.exists() and not overwrite:
        raise EdgespecError(
            "E_OUTPUT_EXISTS", f"'{path}' exists.", "Choose another name, or overwrite it: `save(overwrite=True)`."
        )
    try:
        make_folder(path.parent)
        with written_whole(path) as partial:
            partial.write_text(content, encoding="utf-8")
    except OSError as error:
        raise EdgespecError(
            "E_OUTPUT",
            f"cannot write '{path}' ({error.strerror}).",
            "Name a file in a folder that can be written, or set EDGESPEC_HOME.",
        ) from error


def read_session(path: Path, tokenizer: PreTrainedTokenizerBase) -> SavedSession:
    """Read and check a saved session; raises EdgespecError."""
    content = _read_json(path)
    if content.get("schema") != SCHEMA:
        raise _invalid(path, f"its schema is {shown(content.get('schema'))}, not {SCHEMA!r}")
    messages = content.get("messages")
    if not isinstance(messages, list):
        raise _invalid(path, "it has no list of messages")
    count = len(messages)
    token_ids = content.get("token_ids", [[]] * count)
    interrupted = content.get("interrupted", [])
    if not isinstance(token_ids, list) or len(token_ids) != count:
        raise _invalid(path, f"token_ids are not a list for each of its {count} messages")
    if not isinstance(interrupted, list) or not all(_is_index(index, count) for index in interrupted):
        raise _invalid(path, "interrupted is not a list of its messages' numbers")
    return SavedSession(
        model=_text(path, content, "model"),
        draft_model=_text(path, content, "draft_model"),
        system=_text(path, content, "system"),
        day=_day(path, content),
        settings=_object(path, content, "settings"),
        messages=tuple(
            _message(path, number, entry, ids, tokenizer, is_interrupted=number in interrupted)
            for number, (entry, ids) in enumerate(zip(messages, token_ids, strict=True))
        ),
        stats=_object(path, content, "stats"),
    )


def _message(
    path: Path, number: int, entry: Any, ids: Any, tokenizer: PreTrainedTokenizerBase, *, is_interrupted: bool
) -> Message:
    if not isinstance(entry, dict) or entry.get("role") not in ("user", "assistant"):
        raise _invalid(path, f"message {number} has no role of user or assistant")
    content = _text(path, entry, "content")
    if content is None:
        raise _invalid(path, f"message {number} has no content")
    if not isinstance(ids, list) or not all(_is_index(index, len(tokenizer)) for index in ids):
        raise _invalid(path, f"the token ids of message {number} are none of this model's")
    return Message(
        role=entry["role"],
        content=content,
        # Whoever edits the text by hand means the text.
        token_ids=tuple(ids) if _spell(tokenizer, ids, content) else (),
        is_interrupted=is_interrupted,
    )


def _spell(tokenizer: PreTrainedTokenizerBase, ids: list[int], content: str) -> bool:
    """Return whether the tokens make up the text, a character cut at its end aside."""
    texts = (text_of_tokens(tokenizer, ids, keeps_special=keeps) for keeps in (False, True))
    return content.rstrip(CUT_CHARACTER) in (text.rstrip(CUT_CHARACTER) for text in texts)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise _invalid(path, f"it has {path.stat().st_size >> 20} MiB")
        content = parse_json(path.read_bytes().decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise EdgespecError("E_FILE_NOT_FOUND", f"there is no file '{path}'.", "Name a saved session.") from error
    except OSError as error:
        raise EdgespecError("E_FILE_NOT_FOUND", f"cannot read '{path}' ({error.strerror}).", "Name a file.") from error
    except ValueError as error:
        raise _invalid(path, f"it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _invalid(path, "it is not a JSON object")
    return content


def _text(path: Path, content: dict[str, Any], name: str) -> str | None:
    value = content.get(name)
    if value is None:
        return None
    if not is_text(value):
        raise _invalid(path, f"{name} is no text")
    return value


def _day(path: Path, content: dict[str, Any]) -> datetime.date | None:
    text = _text(path, content, "day")
    day = parse_day(text)
    if text is not None and day is None:
        raise _invalid(path, "day is no day as 2026-11-25")
    return day


def _object(path: Path, content: dict[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise _invalid(path, f"{name} is not a JSON object")
    return value


def _is_index(value: Any, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def _invalid(path: Path, reason: str) -> EdgespecError:
    return EdgespecError(
        "E_SESSION", f"'{path}' is no session that can be read: {reason}.", "Name a file that `save` wrote."
    )
