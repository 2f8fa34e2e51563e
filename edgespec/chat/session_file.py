"""Saved conversations: one JSON document whose messages have the form that other tools read, or a transcript.

The tokens of the answers are kept beside the messages: the same text can be written with other tokens than the
tokenizer would choose for it, and a session must go on from those that were written. Of a picture its file's name and
the digest of its pixels are kept, which have to be there again.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from edgespec.chat.chat_template import Message
from edgespec.chat.pictures import PictureSource
from edgespec.chat.tools import call_line
from edgespec.errors import EdgespecError
from edgespec.text.token_text import CUT_CHARACTER, text_of_tokens
from edgespec.user_paths import json_text, make_folder, written_whole
from edgespec.validation import parse_json, read_as, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = "edgespec.session/1"
MAX_BYTES = 256 << 20  # of a session: far more than any context holds


Number = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PictureEntry:
    """A picture as it stands in a file."""

    sha256: str = ""  # of its pixels
    file: str | None = None
    data: str | None = None  # an address with data, in a file that the server's page has written

    def source(self, number: int) -> PictureSource:
        """Return the picture where it is the same as it was; raises EdgespecError."""
        where = f"picture {number}"
        if self.file is None and self.data is None:
            fix = "Ask anew, with the picture."
            raise EdgespecError("E_PICTURE", f"{where} was given without a file, which a session would need.", fix)
        given = self.data if self.file is None else Path(self.file)
        return PictureSource(where=where, given=given, sha256=self.sha256).known()


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageEntry:
    """A message as it stands in a file."""

    role: Literal["user", "assistant", "tool"]
    content: str
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    images: list[_PictureEntry] | None = None

    def more(self) -> dict[str, Any]:
        """Return what stands beside role and content."""
        own = ("role", "content", "images")
        return {name: value for name, value in asdict(self).items() if name not in own and value}


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageLists:
    """The messages of a file, and what stands beside them there."""

    messages: tuple[_MessageEntry, ...]
    token_ids: tuple[tuple[Number, ...], ...] = ()
    interrupted: tuple[Number, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """The content of a session's file; other keys are for people."""

    model: str | None = None
    draft_model: str | None = None
    adapters: tuple[tuple[str, str, float], ...] = ()  # name, place and scale of each
    system: str | None = None
    day: datetime.date | None = None  # in the chat template
    settings: dict[str, Any] = field(default_factory=dict)  # of the command that saved it
    messages: tuple[Message, ...] = ()
    stats: dict[str, Any] = field(default_factory=dict)

    def document(self) -> str:
        """Return the session as JSON."""
        content = {
            "schema": SCHEMA,
            "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "model": self.model,
            "draft_model": self.draft_model,
            **({"adapters": [list(one) for one in self.adapters]} if self.adapters else {}),
            "system": self.system,
            "day": self.day and self.day.isoformat(),
            "settings": self.settings,
            "messages": [
                {"role": message.role, "content": message.content, **message.more, **_images(message)}
                for message in self.messages
            ],
            "token_ids": [list(message.token_ids) for message in self.messages],
            "interrupted": [index for index, message in enumerate(self.messages) if message.is_interrupted],
            "stats": self.stats,
        }
        return json_text(content, indent=1) + "\n"


def _images(message: Message) -> dict[str, Any]:
    """Return what a file says of a message's pictures."""
    entries = []
    for source in message.pictures:
        places = {"file": str(source.given.absolute())} if isinstance(source.given, Path) else {}
        places |= {"data": source.given} if isinstance(source.given, str) else {}
        entries.append({"sha256": source.sha256, **places})
    return {"images": entries} if entries else {}


def transcript(session: SavedSession) -> str:
    """Return the session for reading, in Markdown."""
    system = (Message(role="system", content=session.system),) if session.system else ()
    parts = [f"# {session.model}"]
    for message in (*system, *session.messages):
        note = " (interrupted)" if message.is_interrupted else ""
        calls = (f"Call: {call_line(call)}" for call in message.calls)
        pictures = (f"Picture: {source.given}" for source in message.pictures if isinstance(source.given, Path))
        parts.append("\n\n".join([f"## {message.role}{note}", *pictures, message.content.rstrip(), *calls]))
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
        fix = "Name a file in a folder that can be written, or set EDGESPEC_HOME."
        raise EdgespecError("E_OUTPUT", f"cannot write '{path}' ({error.strerror}).", fix) from error


def read_session(path: Path, tokenizer: PreTrainedTokenizerBase) -> SavedSession:
    """Read and check a saved session; raises EdgespecError."""
    content = _read_json(path)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise _invalid(path, f"its schema is {shown(schema)}, not {SCHEMA!r}")

    def wrong(key: str, problem: str) -> EdgespecError:
        return _invalid(path, f"{key} {problem}")

    session, found = read_as(SavedSession, {**content, "messages": []}, wrong), read_as(_MessageLists, content, wrong)
    count = len(found.messages)
    token_ids = found.token_ids or ((),) * count
    if len(token_ids) != count:
        raise _invalid(path, f"token_ids are not a list for each of its {count} messages")
    if any(index >= count for index in found.interrupted):
        raise _invalid(path, "interrupted is not a list of its messages' numbers")
    for number, ids in enumerate(token_ids):
        if any(token >= len(tokenizer) for token in ids):
            raise _invalid(path, f"the token ids of message {number} are none of this model's")
    messages = tuple(
        Message(
            role=entry.role,
            content=entry.content,
            token_ids=ids if _spell(tokenizer, ids, entry.content) else (),  # else the text was edited by hand
            is_interrupted=number in found.interrupted,
            more=entry.more(),
            pictures=tuple(picture.source(place) for place, picture in enumerate(entry.images or (), 1)),
        )
        for number, (entry, ids) in enumerate(zip(found.messages, token_ids, strict=True))
    )
    return replace(session, messages=messages)


def _spell(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], content: str) -> bool:
    """Return whether the tokens make up the text, a character cut at its end aside."""
    texts = (text_of_tokens(tokenizer, ids, keeps_special=keeps) for keeps in (False, True))
    return content.rstrip(CUT_CHARACTER) in (text.rstrip(CUT_CHARACTER) for text in texts)


def _read_json(path: Path) -> Any:
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise _invalid(path, f"it has {path.stat().st_size >> 20} MiB")
        return parse_json(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        what = f"cannot read '{path}' ({error.strerror})."
        raise EdgespecError("E_FILE_NOT_FOUND", what, "Name a saved session.") from error
    except ValueError as error:
        raise _invalid(path, f"it is not JSON: {error}") from error


def _invalid(path: Path, reason: str) -> EdgespecError:
    return EdgespecError(
        "E_SESSION", f"'{path}' is no session that can be read: {reason}.", "Name a file that `save` wrote."
    )
