"""Small pictures as files hold them, and damaged ones."""

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image


def image(mode: str = "RGB", size: tuple[int, int] = (12, 8), *, seed: int = 0) -> Image.Image:
    """A picture whose pixels differ."""
    return Image.radial_gradient("L").rotate(7 * seed).resize(size).convert("RGB").convert(mode)


def saved(picture: Image.Image | None = None, kind: str = "PNG", **options: Any) -> bytes:
    """What a file of the picture holds."""
    buffer = io.BytesIO()
    (image() if picture is None else picture).save(buffer, kind, **options)
    return buffer.getvalue()


def data_address(content: bytes, kind: str = "image/png") -> str:
    """The address that holds a file."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and has none: a bomb's head."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def gif_of_size(width: int, height: int) -> bytes:
    """The same as GIF."""
    return b"GIF89a" + struct.pack("<HH", width, height) + saved(kind="GIF")[10:]


def webp_of_size(width: int, height: int) -> bytes:
    """The same as WEBP with a canvas."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + (10).to_bytes(4, "little") + b"\x02\0\0\0" + size
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def jpeg_of_size(width: int, height: int) -> bytes:
    """The same as JPEG: the frame's size is another."""
    found = bytearray(saved(kind="JPEG"))
    start = found.index(b"\xff\xc0") + 5
    found[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(found)
