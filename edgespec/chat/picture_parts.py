"""Pictures among the parts of messages, in any protocol's form: each becomes a part that holds its source.

Templates are rendered with such parts alone, so that what a client sends is never taken for the name of a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.chat.pictures import Given, PictureSource, check_count
from edgespec.errors import EdgespecError
from edgespec.validation import shown

KINDS = ("image", "image_url", "input_image")
PICTURE = "image"  # of a part: its kind, and the key of its source
_FIX = 'Write {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}.'


def with_sources(
    messages: Sequence[Mapping[str, Any]],
    *,
    folder: Path | None = None,
    is_numbered: bool = True,
) -> list[Mapping[str, Any]]:
    """Return messages whose pictures are sources, which nobody has read yet.

    Names of files are read from a `folder`; None refuses them, as pixels that are no data. Errors name a picture by its
    number, and by its message's unless one knows it already. Raises EdgespecError.
    """
    found: list[Mapping[str, Any]] = []
    count = 0
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and any(is_picture(part) for part in content):
            parts = []
            for part in content:
                count += is_picture(part)
                where = f"picture {count} (message {number})" if is_numbered else f"picture {count}"
                parts.append(_with_source(part, where, folder) if is_picture(part) else part)
            message = {**message, "content": parts}
        if isinstance(message, Mapping) and message.get("images"):
            what = f"message {number} has images beside its content, where a picture has no place."
            raise EdgespecError("E_PICTURE", what, _FIX.replace("Write", "Write each as a part of the content:"))
        found.append(message)
    check_count(sources_of(found))
    return found


def sources_of(messages: Sequence[Mapping[str, Any]]) -> list[PictureSource]:
    """Return the pictures of messages, in their order."""
    objects = [message for message in messages if isinstance(message, Mapping)]
    contents = [content for message in objects if isinstance(content := message.get("content"), list)]
    parts = [part[PICTURE] for content in contents for part in content if is_picture(part) and PICTURE in part]
    return [part for part in parts if isinstance(part, PictureSource)]


def picture_part(source: PictureSource) -> dict[str, Any]:
    """Return the part of a message that is a picture."""
    return {"type": PICTURE, PICTURE: source}


def text_of(content: object) -> str:
    """Return the words of a message's content, a text or parts."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return content if isinstance(content, str) else ""


def is_picture(part: object) -> bool:
    """Return whether a part of a message is a picture, in whatever form."""
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _with_source(part: Mapping[str, Any], where: str, folder: Path | None) -> dict[str, Any]:
    if isinstance(part.get(PICTURE), PictureSource):
        return picture_part(part[PICTURE])
    return picture_part(PictureSource(where=where, given=_given(part, where, folder)))


def _given(part: Mapping[str, Any], where: str, folder: Path | None) -> Given:
    """Return what a part gives for a picture."""
    if part.get("file_id") is not None:
        raise EdgespecError("E_PICTURE", f"{where} names a file_id, and no files are kept here.", _FIX)
    source = part.get("source")
    if isinstance(source, Mapping):
        if source.get("type") != "base64":
            what = f"{where} has a source of type {shown(source.get('type'))}, and nothing is ever fetched."
            raise EdgespecError("E_PICTURE", what, "Send the picture itself, with a source of type base64.")
        return _text(source.get("data"), where)
    if part["type"] != PICTURE:
        address = part.get("image_url")
        return _address(address.get("url") if isinstance(address, Mapping) else address, where, folder)
    names = [name for name in (PICTURE, "url", "path", "base64") if part.get(name) is not None]
    if len(names) != 1:
        what = f"{where} has {' and '.join(names) or 'nothing that is one'}, and one picture is a part."
        raise EdgespecError("E_PICTURE", what, _FIX)
    given = part[names[0]]
    if names[0] == "base64":
        return _text(given, where)
    if isinstance(given, str):
        return _address(given, where, folder)
    if folder is not None and (isinstance(given, bytes) or hasattr(given, "convert")):
        return given  # type: ignore[no-any-return]
    if folder is not None and isinstance(given, Path):
        return folder / given
    raise EdgespecError("E_PICTURE", f"{where} is no picture, but of type {type(given).__name__}.", _FIX)


def _address(given: object, where: str, folder: Path | None) -> Given:
    """Return an address, which `PictureSource` reads or refuses, or the path of a file."""
    text = _text(given, where)
    head = text[:64]
    is_address = ":" in head and len(head.partition(":")[0]) > 1  # C:\\ is a drive
    if is_address or folder is None:
        if not is_address:
            what = f"{where} is no address with data, and names of files are not read here."
            raise EdgespecError("E_PICTURE", what, _FIX)
        return text
    return folder / text


def _text(given: object, where: str) -> str:
    if not isinstance(given, str):
        raise EdgespecError("E_PICTURE", f"{where} is no text, but of type {type(given).__name__}.", _FIX)
    return given
