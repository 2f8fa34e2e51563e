"""One row of a prompt file, with its prompt and settings under the names that other tools use.

Exactly one of `prompt` (a string), `messages` (a conversation to go on with), `turns` (questions put one after the
other, as MT-Bench and Spec-Bench do) and `body` (an OpenAI batch request with `messages` or `prompt`); or, in
place of an object, a string or a pair [id, text]. A batch's completion is its prompt as it stands, without a template.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.chat.picture_parts import PICTURE, is_picture, picture_part, sources_of, text_of, with_sources
from edgespec.chat.pictures import PictureSource
from edgespec.chat.rendering import MESSAGE_FIX, with_text
from edgespec.cli.prompts.batch_rows import (
    DEFAULT_COMPLETION_TOKENS,
    echoed,
    endpoint,
    endpoint_fault,
    is_response,
    single_prompt,
)
from edgespec.cli.prompts.response_rows import chat_body
from edgespec.cli.prompts.row_keys import SETTING_OF, sorted_out
from edgespec.cli.prompts.row_settings import RowSettings, parse_settings
from edgespec.errors import EdgespecError

MessageFields = Mapping[str, Any]  # role, content, and what else the template may read

SOURCES = ("prompt", "messages", "turns", "body")
SYSTEM_ROLES = {"system", "developer"}
BODY_SOURCES = ("messages", "prompt")
ID_KEYS = ("id", "custom_id", "question_id")
IMAGES = "images"  # of a row: files and addresses with data
FORM_KEYS = frozenset({*SOURCES, *ID_KEYS, IMAGES, "category", "reference"})
EXAMPLE = 'Write rows like {"id": "a", "prompt": "def main("}.'


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A prompt or conversation, with its settings and the other keys of its row."""

    id: str  # "" until `prompts.read_prompts` has seen all rows
    where: str  # for messages: 'line 3', or the file's name
    kind: str  # one of KIND_NAMES in read.py
    messages: tuple[MessageFields, ...]  # up to the first answer
    as_written: str | list[Any] | dict[str, Any]  # the prompt, messages, turns or body as written, for the record
    token_ids: tuple[int, ...] = ()  # of a completion whose prompt is no text
    echoes: bool = False  # its prompt stands before a completion's text
    follow_ups: tuple[str, ...] = ()  # put after each answer
    own_id: str | int | None = None
    settings: RowSettings = field(default_factory=RowSettings)
    category: Any = None
    reference: Any = None
    meta: dict[str, Any] = field(default_factory=dict)  # unknown keys, handed through to the result
    ignored_keys: frozenset[str] = frozenset()  # that would change the text in other tools, and do not here
    unknown_keys: frozenset[str] = frozenset()
    image_digests: tuple[str, ...] = ()  # of the pictures of its messages
    fault: EdgespecError | None = None  # why it cannot be run, though the others can
    index: int = 0  # in the file
    repeat: int = 0

    @property
    def prompt(self) -> str:
        """Return the text of all messages up to the first answer, one below the other."""
        return "\n".join(text_of(message["content"]) for message in self.messages if message["content"])

    @property
    def sees(self) -> bool:
        """Return whether its messages have pictures."""
        return bool(sources_of(self.messages))

    @property
    def has_system(self) -> bool:
        """Return whether the row has a system message of its own."""
        return bool(self.settings.system) or any(message["role"] in SYSTEM_ROLES for message in self.messages)

    @property
    def num_turns(self) -> int:
        """Return the number of answers that the row needs."""
        return 1 + len(self.follow_ups)

    @property
    def digest(self) -> str:
        """Return a digest of all that shapes the row's text."""
        kind = [self.kind, *(["echo"] if self.echoes else [])] if self.kind == "completion" else []
        shapes = [self.as_written, self.settings.set_values(), *kind, *self.image_digests]
        content = json.dumps(shapes, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:8]


def with_adapter_of_model(row: PromptRow, names: Collection[str]) -> PromptRow:
    """Return a row whose `model` is BASE:ADAPTER, as of a server's request, as one that names one of these adapters."""
    body = row.meta.get("body")
    model = (body if isinstance(body, dict) else row.meta).get("model")
    found = [name for name in names if isinstance(model, str) and model.endswith(f":{name}")]
    if not found or row.settings.adapter is not None:
        return row
    settings = replace(row.settings, adapter=(max(found, key=len),))
    return replace(row, settings=settings, ignored_keys=row.ignored_keys - {"model"})


def text_row(text: str, where: str, *, kind: str, own_id: str | int | None = None) -> PromptRow:
    """Make a row of a prompt that is only text; raises EdgespecError when it is empty."""
    if not text:
        raise EdgespecError("E_PROMPT_EMPTY", f"{where} has an empty prompt.", "Remove it.")
    return PromptRow(id=_as_id(own_id), where=where, kind=kind, messages=(_user(text),), as_written=text, own_id=own_id)


def with_images(row: PromptRow, images: Sequence[str], folder: Path) -> PromptRow:
    """Return a row whose first message begins with pictures; names of files are looked for from `folder` on."""
    first, *others = row.messages
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": first["content"]}]
    messages, fault = _sourced([{**first, "content": parts}, *others], folder)
    return replace(row, messages=tuple(messages), fault=fault)


def with_digests(row: PromptRow, digests: Sequence[str]) -> PromptRow:
    """Return a row that knows its pictures by the digests of their pixels, and takes no others from now on."""
    left, messages = iter(digests), []
    for message in row.messages:
        content = message["content"]
        if isinstance(content, list):
            content = [
                picture_part(replace(part[PICTURE], sha256=next(left))) if is_picture(part) else part
                for part in content
            ]
        messages.append({**message, "content": content})
    return replace(row, messages=tuple(messages), image_digests=tuple(digests))


def parse_row(value: object, where: str, folder: Path | None = None) -> PromptRow:
    """Parse a row that was read as JSON; raises EdgespecError that names the row.

    Its pictures may be files, named from `folder` on; None is the current one.
    """
    if isinstance(value, str):
        return text_row(value, where, kind="string")
    if isinstance(value, list):
        if len(value) != 2 or not _is_id(value[0]) or not isinstance(value[1], str):
            raise _invalid(f"{where} is a list, and no pair [id, text].", 'Write ["a", "def main("].')
        return text_row(value[1], where, kind="pair", own_id=value[0])
    if not isinstance(value, dict):
        raise _invalid(f"{where} is no object, string or pair.", EXAMPLE)
    return _parse_object(value, where, folder or Path())


def _parse_object(row: dict[str, Any], where: str, folder: Path) -> PromptRow:
    source = _only_one(row, SOURCES, where)
    body = row["body"] if source == "body" else {}
    id_key = next((key for key in ID_KEYS if row.get(key) is not None), None)
    own_id = row[id_key] if id_key else None
    if own_id is not None and not _is_id(own_id):
        raise _invalid(f"{where} has an id that is no string or whole number.", "Write the id as a string.")
    if source == "body":
        try:
            body = chat_body(body, where) if is_response(row) else body
        except EdgespecError as error:
            fault: EdgespecError | None = error
        else:
            fault = endpoint_fault(row)
        if fault is not None:
            return PromptRow(
                id=_as_id(own_id), where=where, kind="fault", messages=(), as_written=body, own_id=own_id, fault=fault
            )
        row = {**row, "body": body}
        source = _only_one(body, BODY_SOURCES, f"the body of {where}")
    echoes = bool(body) and source == "prompt" and body.get("echo") is True
    if echoes:
        body = echoed(body)
        row = {**row, "body": body}
    content = (body or row)[source]
    settings = parse_settings(row, where)
    ignored, unknown = sorted_out(row, FORM_KEYS)
    known = {*SETTING_OF, IMAGES, "category", "reference", id_key, "body" if body else source}
    meta = {key: value for key, value in row.items() if key not in known}
    rest = {key: value for key, value in body.items() if key not in {*SETTING_OF, source}}
    kind = {"prompt": "completion", "messages": "response" if is_response(row) else "batch"}[source] if body else source
    if kind == "turns" and id_key == "question_id":
        kind = "mt-bench"
    token_ids: tuple[int, ...] = ()
    if kind == "completion":
        content = single_prompt(content, where)
        token_ids = () if isinstance(content, str) else tuple(content)
        if endpoint(row) and settings.max_new_tokens is None:
            settings = replace(settings, max_new_tokens=DEFAULT_COMPLETION_TOKENS)
    images, fault = _images(row, where), None
    if source == "messages" and isinstance(content, list):
        content, images = _filled(content, images, where), []
        sourced, fault = _sourced(content, folder)
        messages, follow_ups = _parse_messages(sourced, where)
        content = _without_pixels(content)
    else:
        messages, follow_ups = ((), ()) if token_ids else _PARSERS[source](content, where)
    if images and kind == "completion":
        raise _invalid(f'{where} has "images" beside a completion\'s prompt.', "Write them as parts of messages.")
    if settings.system is not None and any(message["role"] in SYSTEM_ROLES for message in messages):
        raise _invalid(f'{where} has both "system" and a system message.', "Keep one of them.")
    found = PromptRow(
        id=_as_id(own_id),
        where=where,
        kind=kind,
        messages=messages,
        follow_ups=follow_ups,
        as_written=content,
        token_ids=token_ids,
        echoes=echoes,
        own_id=own_id,
        settings=settings,
        category=row.get("category"),
        reference=row.get("reference"),
        meta=meta | ({"body": rest} if rest else {}),
        ignored_keys=ignored,
        unknown_keys=unknown,
        fault=fault,
    )
    return with_images(found, images, folder) if images else found


def _images(row: Mapping[str, Any], where: str) -> list[str]:
    """Return the pictures of a row, beside its messages: names of files, and addresses with data."""
    images = row.get(IMAGES) or []
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        fix = 'Write {"prompt": "What is this?", "images": ["cat.png"]}.'
        raise EdgespecError("E_PICTURE", f'the "images" of {where} are no list of file names.', fix)
    return images


def _filled(messages: list[Any], images: list[str], where: str) -> list[Any]:
    """Return messages in which each part {"type": "image"} has the next of the images; all have to be used."""
    left, found = list(images), []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and images:
            content = [
                {**part, "image": left.pop(0)} if part == {"type": "image"} and left else part for part in content
            ]
            message = {**message, "content": content}
        found.append(message)
    if left:
        what = f'{where} has {len(images)} "images", and its messages have {len(images) - len(left)} places for them.'
        raise EdgespecError("E_PICTURE", what, 'Write {"type": "image"} into the content where each belongs.')
    return found


def _sourced(messages: list[Any], folder: Path) -> tuple[list[Any], EdgespecError | None]:
    """Return messages whose pictures are sources; where one cannot be, of pictures nothing is left, and the reason."""
    try:
        return list(with_sources(messages, folder=folder, is_numbered=False)), None
    except EdgespecError as error:
        return _with_each_picture(messages, picture_part(PictureSource(where="", given=b""))), error


def _without_pixels(messages: list[Any]) -> list[Any]:
    """Return messages as records have them: of a picture its place, since its digest stands beside them."""
    return _with_each_picture(messages, {"type": "image"})


def _with_each_picture(messages: list[Any], picture: Mapping[str, Any]) -> list[Any]:
    """Return messages with this part in the place of each picture."""
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            message = {**message, "content": [picture if is_picture(part) else part for part in content]}
        found.append(message)
    return found


def _only_one(row: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    """Return the one of the names that the row has a value for; raises EdgespecError unless it has one."""
    found = [name for name in names if row.get(name) is not None and (name != "body" or isinstance(row[name], dict))]
    if not found:
        listed = ", ".join(f'"{name}"' for name in names[:-1]) + f' and "{names[-1]}"'
        raise _invalid(f"{where} has none of {listed}.", EXAMPLE)
    if len(found) > 1:
        raise _invalid(f'{where} has both "{found[0]}" and "{found[1]}".', "Keep one of them.")
    return found[0]


def _parse_prompt(content: object, where: str) -> tuple[tuple[MessageFields, ...], tuple[str, ...]]:
    if not isinstance(content, str):
        raise _invalid(f'the "prompt" of {where} is no string.', EXAMPLE)
    if not content:
        raise EdgespecError("E_PROMPT_EMPTY", f"{where} has an empty prompt.", "Remove the row.")
    return (_user(content),), ()


def _parse_turns(content: object, where: str) -> tuple[tuple[MessageFields, ...], tuple[str, ...]]:
    if not isinstance(content, list) or not content or not all(isinstance(turn, str) for turn in content):
        raise _invalid(f'the "turns" of {where} are no list of strings.', 'Write {"turns": ["first", "second"]}.')
    if not all(content):
        raise EdgespecError("E_PROMPT_EMPTY", f"{where} has an empty turn.", "Remove it.")
    return (_user(content[0]),), tuple(content[1:])


def _parse_messages(content: object, where: str) -> tuple[tuple[MessageFields, ...], tuple[str, ...]]:
    if not isinstance(content, list) or not content:
        raise _invalid(f'the "messages" of {where} are no list of messages.', MESSAGE_FIX)
    messages = tuple(
        _parse_message(message, f"message {number} of {where}") for number, message in enumerate(content, 1)
    )
    if not any(message["content"] for message in messages):
        raise EdgespecError("E_PROMPT_EMPTY", f"the messages of {where} are empty.", "Remove the row.")
    return messages, ()


def _parse_message(message: object, where: str) -> MessageFields:
    """Parse one message, with its text as a string."""
    found = with_text(message, where)
    if found["content"] is None and found["role"] != "assistant":  # who may only call tools
        raise _invalid(f'{where} has no "content".', MESSAGE_FIX)
    return found


_PARSERS = {"prompt": _parse_prompt, "turns": _parse_turns, "messages": _parse_messages}


def _user(text: str) -> MessageFields:
    return {"role": "user", "content": text}


def _is_id(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _as_id(given: str | int | None) -> str:
    return "" if given is None else str(given)


def _invalid(what: str, fix: str) -> EdgespecError:
    return EdgespecError("E_PROMPT_INVALID", what, fix)
