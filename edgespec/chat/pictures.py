"""Pictures as they come in: from a file, from bytes, or from text in base64. Nothing is ever fetched.

What a picture is, its content says, not its name. Its size is read before its pixels are, and four kinds are read at
all: Pillow has many more decoders than one wants open to others. Errors name the place of a picture, never its bytes.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from edgespec.errors import EdgespecError
from edgespec.validation import shown

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PICTURES = 16  # of one request
MAX_BYTES = 10 << 20  # of one picture
MAX_PIXELS = 50_000_000
MAX_RATIO = 200  # of a picture's sides; families' processors take no more
FIX = "Give a PNG, JPEG, WEBP or GIF file."
# What files begin with -> what they are; for a message, since their content is read by nobody
OTHER_KINDS = {
    b"%PDF": "a PDF", b"BM": "a bitmap", b"II*\0": "a TIFF", b"MM\0*": "a TIFF", b"<svg": "an SVG drawing",
    b"<?xml": "an XML document", b"<!DOCTYPE": "a web page", b"<html": "a web page", b"\x1aE\xdf\xa3": "a video",
    b"PK\x03\x04": "an archive", b"8BPS": "a Photoshop file", b"\0\0\1\0": "an icon", b"OggS": "a sound or a video",
    b"ID3": "a sound", b"fLaC": "a sound", b"GGUF": "a model", b"\x1f\x8b": "a packed file",
}  # fmt: skip
# The same of files whose fifth to twelfth bytes tell
BRANDS = {
    b"ftypheic": "an HEIC picture", b"ftypheix": "an HEIC picture", b"ftypmif1": "an HEIC picture",
    b"ftypavif": "an AVIF picture", b"ftypavis": "an AVIF picture", b"ftyp": "a video",
}  # fmt: skip

Given: TypeAlias = "str | bytes | Path | Image"  # base64 or an address with data, what a file holds, a file, or pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture that was read."""

    digest: str  # sha256 of mode, size and pixels
    image: Image  # RGB


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """A picture that is read when its prompt is made."""

    where: str  # that messages name
    given: Any  # a `Given`: a record of sessions has no type of pixels
    sha256: str = ""  # of its pixels, where they were read once; empty: any

    def read(self) -> Picture:
        """Return the picture; raises EdgespecError that names the place, also where it has changed since."""
        found = _read(self.given, self.where)
        if self.sha256 not in ("", found.digest):
            what = "has changed since it was read first" if isinstance(self.given, Path) else "is another one"
            raise _wrong(self.where, what, "Put the former one back, or begin anew.")
        return found

    def known(self) -> PictureSource:
        """Return the same picture with its digest; raises EdgespecError as `read` does."""
        return replace(self, sha256=self.read().digest)

    def __reduce__(self) -> tuple[Any, ...]:
        """Take a file's content along to another machine."""
        given = _file_bytes(self.given, self.where) if isinstance(self.given, Path) else self.given
        return _source, (self.where, given, self.sha256)


def _source(where: str, given: Given, sha256: str) -> PictureSource:
    return PictureSource(where=where, given=given, sha256=sha256)


def check_count(sources: Sequence[object]) -> None:
    """Raise EdgespecError for more pictures than a request may have."""
    if len(sources) > MAX_PICTURES:
        what = f"the prompt has {len(sources)} pictures, and {MAX_PICTURES} may be."
        raise EdgespecError("E_PICTURE", what, "Ask about some of them at a time.")


def check_pillow() -> None:
    """Raise EdgespecError where the library that reads pictures is not installed."""
    _pillow()


def _read(given: Given, where: str) -> Picture:
    library = _pillow()
    if not isinstance(given, str | bytes | Path):
        return _prepared(given, where)
    content = _decoded(given, where) if isinstance(given, str) else given
    content = _file_bytes(content, where) if isinstance(content, Path) else content
    _check_bytes(len(content), where)
    _check_kind(content, where)
    try:
        image = library.open(io.BytesIO(content), formats=FORMATS)
    except (library.DecompressionBombError, library.DecompressionBombWarning) as error:
        raise _wrong(where, f"has more than {MAX_PIXELS // 1_000_000} million pixels", "Make it smaller.") from error
    except Exception as error:  # decoders raise many kinds
        raise _wrong(where, f"is damaged, or none of {', '.join(FORMATS)}") from error
    with image:
        return _prepared(image, where)


@functools.cache
def _pillow() -> ModuleType:
    """Return Pillow's module of images; raises EdgespecError where it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        what = "pictures need the library Pillow, which is not installed."
        raise EdgespecError("E_PICTURE", what, "Install it: pip install 'edgespec[images]'.") from error
    return PIL.Image


def _prepared(image: Image, where: str) -> Picture:
    """Return a picture's first frame, turned as it is looked at, in RGB; what is transparent is white."""
    library = _pillow()
    from PIL import ImageOps

    _check_size(*image.size, where)
    if image.mode in ("I", "F"):  # which only programs give
        raise _wrong(where, f"has numbers of no known range (mode {image.mode})", "Convert it to RGB.")
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # of grey, which a conversion would cut off at 255
            image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        if "A" in image.mode or "transparency" in image.info:
            image = image.convert("RGBA")
            image = library.alpha_composite(library.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
        image.info.clear()
    except Exception as error:  # decoders raise many kinds
        raise _wrong(where, "is damaged, or cut off", "Save it again.") from error
    content = hashlib.sha256(f"{image.mode} {image.width} {image.height} ".encode())
    content.update(image.tobytes())
    return Picture(digest=content.hexdigest(), image=image)


def _check_bytes(num_bytes: int, where: str) -> None:
    if not num_bytes:
        raise _wrong(where, "is empty")
    if num_bytes > MAX_BYTES:
        what = f"has {num_bytes / (1 << 20):.1f} MiB, and {MAX_BYTES >> 20} may be"
        raise _wrong(where, what, "Make it smaller, or save it as JPEG.")


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MAX_PIXELS:
        what = f"is {width} x {height} pixels, and {MAX_PIXELS // 1_000_000} million may be"
        raise _wrong(where, what, "Make it smaller.")
    if max(width, height) > MAX_RATIO * min(width, height):
        what = f"is {width} x {height} pixels: one side is more than {MAX_RATIO} times the other"
        raise _wrong(where, what, "Cut it into parts.")


def _check_kind(data: bytes, where: str) -> None:
    """Raise EdgespecError for a file of another kind, and for a WEBP that is too large.

    Its decoder makes room for all pixels before it says how many there are.
    """
    start = data[:16].lstrip()
    found = next((kind for mark, kind in OTHER_KINDS.items() if start.startswith(mark)), None)
    found = found or next((kind for mark, kind in BRANDS.items() if data[4:].startswith(mark)), None)
    if found is not None:
        raise _wrong(where, f"is {found}")
    if data.startswith(b"RIFF") and data[8:12] in (b"AVI ", b"WAVE"):
        raise _wrong(where, "is a sound or a video")
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        _check_size(*_webp_size(data, where), where)


def _webp_size(data: bytes, where: str) -> tuple[int, int]:
    """Return width and height as a WEBP's first chunk says them."""

    def number(start: int, num_bytes: int) -> int:
        if len(data) < start + num_bytes:
            raise _wrong(where, "is damaged, or cut off", "Save it again.")
        return int.from_bytes(data[start : start + num_bytes], "little")

    match data[12:16]:
        case b"VP8X":
            return 1 + number(24, 3), 1 + number(27, 3)
        case b"VP8L":
            bits = number(21, 4)
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            return max(1, number(26, 2) & 0x3FFF), max(1, number(28, 2) & 0x3FFF)
    raise _wrong(where, "is damaged, or none of " + ", ".join(FORMATS))


def _file_bytes(path: Path, where: str) -> bytes:
    try:
        if not path.exists():
            raise EdgespecError("E_FILE_NOT_FOUND", f"{where}: there is no file {shown(str(path))}.", FIX)
        if not path.is_file():
            raise _wrong(where, f"is {shown(str(path))}, which is no file")
        _check_bytes(path.stat().st_size, where)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"{where}: cannot read {shown(str(path))} ({reason})."
        raise EdgespecError("E_FILE_NOT_FOUND", what, FIX) from error


def _decoded(text: str, where: str) -> bytes:
    """Return the bytes of an address with data, or of base64 alone; raises EdgespecError for any other address."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", text[:64])
    if scheme is not None and scheme[1].lower() != "data":
        what = f"is an address of {scheme[1].lower()}:, and nothing is ever fetched"
        raise _wrong(where, what, "Send the picture itself, as data:image/png;base64,...")
    if scheme is not None:
        head, comma, text = text.partition(",")
        kind = head[len("data:") :].partition(";")[0].lower()
        if kind.startswith(("video/", "audio/")):
            raise _wrong(where, f"is a {'video' if kind.startswith('v') else 'sound'}, and only pictures are seen")
        if not comma or not head.lower().endswith(";base64"):
            raise _wrong(where, "is an address with data that is not in base64", "Write data:image/png;base64,...")
    if len(text) > MAX_BYTES // 3 * 4 + (1 << 16):  # line breaks, which some programs write
        _check_bytes(len(text) // 4 * 3, where)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(where, "is no base64", "Encode the whole file, with its padding.") from error


def _wrong(where: str, what: str, fix: str = FIX) -> EdgespecError:
    return EdgespecError("E_PICTURE", f"{where} {what}.", fix)
