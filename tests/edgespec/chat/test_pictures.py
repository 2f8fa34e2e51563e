"""A hundred pictures that are none, and those that look odd and are fine."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edgespec.chat import pictures
from edgespec.chat.pictures import MAX_BYTES, PictureSource, check_count
from edgespec.errors import EdgespecError
from tests.support.picture_files import (
    data_address,
    gif_of_size,
    image,
    jpeg_of_size,
    png_of_size,
    saved,
    webp_of_size,
)

WHERE = "picture 1 (message 1)"
KINDS = ("PNG", "JPEG", "WEBP", "GIF")
FILES = {kind: saved(image(size=(64, 48)), kind) for kind in KINDS}
DAMAGED = "is damaged"


def cut(kind: str, share: float) -> bytes:
    return FILES[kind][: int(len(FILES[kind]) * share)]


def garbled(kind: str) -> bytes:
    """The file with its middle overwritten; its end, a JPEG's coefficients aside, no longer fits."""
    content = FILES[kind]
    return content[: len(content) // 3] + b"\xff\xd9" * 8 + content[len(content) // 3 + 16 :][:4]


# What is given -> words of the error. Each names the place, and none shows a byte.
BAD: dict[str, tuple[Any, str]] = {
    **{f"{kind} cut at {share}": (cut(kind, share), DAMAGED) for kind in KINDS for share in (0.05, 0.2, 0.4, 0.6)},
    **{f"{kind} without its beginning": (FILES[kind][3:], DAMAGED) for kind in KINDS},
    **{f"{kind} garbled": (garbled(kind), DAMAGED) for kind in ("PNG", "JPEG", "WEBP")},
    **{f"{kind} of its first 12 bytes": (FILES[kind][:12], DAMAGED) for kind in KINDS},
    # Bombs, and what no family's processor takes: sizes are read before pixels are
    "PNG of 100 million pixels": (png_of_size(10_000, 10_000), "more than 50 million pixels"),
    "PNG of 64 million pixels": (png_of_size(8_000, 8_000), "is 8000 x 8000 pixels, and 50 million may be"),
    "PNG of 50,000 a side": (png_of_size(50_000, 50_000), "more than 50 million pixels"),
    "PNG of 2^31 a side": (png_of_size(2**31 - 1, 2**31 - 1), "more than 50 million pixels"),
    "PNG of 60 million pixels": (png_of_size(60_000, 1_000), "60000 x 1000"),
    "PNG without pixels": (png_of_size(0, 0), DAMAGED),
    "GIF of 65,535 a side": (gif_of_size(65_535, 65_535), "more than 50 million pixels"),
    "GIF of 8,000 a side": (gif_of_size(8_000, 8_000), "8000 x 8000"),
    "WEBP of 16,383 a side": (webp_of_size(16_383, 16_383), "16383 x 16383"),
    "WEBP of 2^24 a side": (webp_of_size(2**24, 2**24), "16777216 x 16777216"),
    "JPEG of 65,500 a side": (jpeg_of_size(65_500, 65_500), "more than 50 million pixels"),
    "JPEG of 9,000 a side": (jpeg_of_size(9_000, 9_000), "9000 x 9000"),
    "1 x 100,000": (saved(image(size=(1, 100_000))), "is 1 x 100000 pixels: one side is more than 200 times"),
    "100,000 x 1": (saved(image(size=(100_000, 1))), "is 100000 x 1 pixels: one side is more than 200 times"),
    "201 x 1": (saved(image(size=(201, 1))), "one side is more than 200 times"),
    "2,001 x 10 as GIF": (saved(image(size=(2_001, 10)), "GIF"), "one side is more than 200 times"),
    "more than 10 MiB": (saved() + bytes(MAX_BYTES), "has 10.0 MiB, and 10 may be"),
    "nothing": (b"", "is empty"),
    # Other kinds, by their content
    **{
        f"{kind} file": (saved(image(), kind), words)
        for kind, words in {"BMP": "is a bitmap", "TIFF": "is a TIFF", "PPM": DAMAGED, "TGA": DAMAGED, "PCX": DAMAGED,
                            "ICO": "is an icon", "SGI": DAMAGED, "EPS": DAMAGED, "PDF": "is a PDF",
                            "JPEG2000": DAMAGED, "AVIF": "is an AVIF picture", "DDS": DAMAGED}.items()
    },
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is an SVG drawing"),
    "SVG behind its XML": (b"  <?xml version='1.0'?><svg/>", "is an XML document"),
    "page of the web": (b"<!DOCTYPE html><html></html>", "is a web page"),
    "HEIC": (b"\0\0\0\x18ftypheic" + bytes(64), "is an HEIC picture"),
    "MP4": (b"\0\0\0\x18ftypisom" + bytes(64), "is a video"),
    "Matroska": (b"\x1aE\xdf\xa3" + bytes(64), "is a video"),
    "AVI": (b"RIFF\0\0\0\0AVI " + bytes(64), "is a sound or a video"),
    "WAV": (b"RIFF\0\0\0\0WAVE" + bytes(64), "is a sound or a video"),
    "MP3": (b"ID3\4" + bytes(64), "is a sound"),
    "ZIP": (b"PK\x03\x04" + bytes(64), "is an archive"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(64), "is a model"),
    "gzip of a PNG": (b"\x1f\x8b\x08" + FILES["PNG"], "is a packed file"),
    "words": (b"a cat on a mat, seen from above", DAMAGED),
    "zeros": (bytes(4096), DAMAGED),
    "RIFF of nothing known": (b"RIFF\0\0\0\0WEBPabcd" + bytes(64), DAMAGED),
    # Addresses: nothing is fetched
    **{
        f"address {address}": (address, f"is an address of {address.partition(':')[0].lower()}:, and nothing is ever")
        for address in ("http://127.0.0.1:1/a.png", "https://example.com/a.png", "HTTPS://EXAMPLE.COM/a.png",
                        "file:///etc/passwd", "FILE:a.png", "ftp://example.com/a.png", "blob:null/1-2", "s3://a/b.png",
                        "gs://a/b.png", "javascript:alert(1)", "C:\\a.png", "about:blank")
    },
    "data address of a video": ("data:video/mp4;base64,AAAA", "is a video, and only pictures are seen"),
    "data address of a sound": ("data:audio/wav;base64,AAAA", "is a sound, and only pictures are seen"),
    "data address without base64": ("data:image/svg+xml,<svg/>", "not in base64"),
    "data address without a comma": ("data:image/png;base64", "not in base64"),
    "data address of nothing": ("data:image/png;base64,", "is empty"),
    "data address of words": (data_address(b"a cat on a mat"), DAMAGED),
    "data address of a PDF": (data_address(b"%PDF-1.7"), "is a PDF"),
    # Base64 that is none
    "base64 with a letter too many": (base64.b64encode(FILES["PNG"]).decode() + "A", "is no base64"),
    "base64 without its padding": (base64.b64encode(b"abcd").decode().rstrip("="), "is no base64"),
    "base64 of another alphabet": ("data:image/png;base64,-_-_", "is no base64"),
    "base64 with a NUL": ("AAAA\0AAA", "is no base64"),
    "base64 with letters of no alphabet": ("Aä==", "is no base64"),
    "base64 cut off": (base64.b64encode(FILES["PNG"]).decode()[:-7], "is no base64"),
    "base64 of 11 MiB": ("A" * (11 << 20) + "A" * (4 << 20), "has 11."),
    "a name": ("cat.png", "is no base64"),
    # Pixels of programs
    "numbers without a range": (Image.new("F", (4, 4)), "mode F"),
    "whole numbers without a range": (Image.new("I", (4, 4)), "mode I"),
    "pixels of 60 million": (Image.new("1", (60_000, 1_000)), "60000 x 1000"),
    "pixels in a line": (Image.new("L", (1_000, 2)), "one side is more than 200 times"),
    # Files
    "a file that is not there": (Path("/nowhere/a.png"), "there is no file '/nowhere/a.png'"),
    "a folder": (Path("/"), "is '/', which is no file"),
    "a device": (Path("/dev/zero"), "which is no file"),
    "a name with a NUL": (Path("a\0b.png"), "there is no file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_by_its_place_and_shows_no_byte_of_it(name: str) -> None:
    given, words = BAD[name]
    with pytest.raises(EdgespecError) as caught:
        PictureSource(where=WHERE, given=given).read()
    error = caught.value
    assert error.code in {"E_PICTURE", "E_FILE_NOT_FOUND"}
    assert error.what.startswith(WHERE)
    assert words in error.what
    assert len(error.what) < 200
    assert re.fullmatch(r"[ -~]+", error.what + error.fix)


def test_there_are_a_hundred() -> None:
    assert len(BAD) >= 100
    with pytest.raises(EdgespecError, match="has 17 pictures, and 16 may be"):
        check_count(range(17))
    check_count(range(16))


def read(given: Any) -> Image.Image:
    return PictureSource(where=WHERE, given=given).read().image


TURNED = Image.Exif()
TURNED[0x0112] = 6  # by a quarter
FINE: dict[str, tuple[Any, tuple[int, int]]] = {
    **{f"{kind}": (content, (64, 48)) for kind, content in FILES.items()},
    **{f"PNG of mode {mode}": (saved(image(mode)), (12, 8)) for mode in ("1", "L", "LA", "P", "RGBA")},
    "PNG of 16 bits": (saved(Image.new("I;16", (12, 8), 40_000)), (12, 8)),
    "JPEG in CMYK": (saved(image("CMYK"), "JPEG"), (12, 8)),
    "JPEG in grey": (saved(image("L"), "JPEG"), (12, 8)),
    "JPEG whose name says PNG": (data_address(FILES["JPEG"], "image/png"), (64, 48)),
    "turned by EXIF": (saved(image(), "JPEG", exif=TURNED), (8, 12)),
    "WEBP turned by EXIF": (saved(image(), "WEBP", exif=TURNED), (8, 12)),
    "without losses": (saved(image(), "WEBP", lossless=True), (12, 8)),
    "200 x 1": (saved(image(size=(200, 1))), (200, 1)),
    "one pixel": (saved(image(size=(1, 1))), (1, 1)),
    "base64 alone": (base64.b64encode(FILES["PNG"]).decode(), (64, 48)),
    "base64 in lines": (base64.encodebytes(FILES["PNG"]).decode(), (64, 48)),
    "address in capitals": (data_address(FILES["GIF"]).replace("data:image/png;base64", "DATA:;BASE64"), (64, 48)),
    "pixels": (image(), (12, 8)),
}


@pytest.mark.parametrize("name", FINE)
def test_an_odd_picture_is_read(name: str) -> None:
    given, size = FINE[name]
    found = read(given)
    assert (found.mode, found.size, found.info) == ("RGB", size, {})


def test_of_an_animation_the_first_frame_is_seen() -> None:
    frames = [Image.new("RGB", (12, 8), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        moving = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
        red, _, blue = read(moving).getpixel((5, 5))
        assert (red > 200, blue < 50) == (True, True), kind


def test_what_is_transparent_is_white_and_grey_of_16_bits_is_not_cut_off() -> None:
    assert read(saved(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))).getpixel((1, 1)) == (255, 255, 255)
    assert read(saved(Image.new("LA", (4, 4), (0, 128)))).getpixel((1, 1)) == (127, 127, 127)
    assert read(saved(Image.new("RGB", (4, 4)), transparency=(0, 0, 0))).getpixel((1, 1)) == (255, 255, 255)
    assert read(saved(Image.new("I;16", (4, 4), 40_000))).getpixel((1, 1)) == (156, 156, 156)


def test_a_digest_is_that_of_the_pixels_whatever_holds_them() -> None:
    def digest(given: Any) -> str:
        return PictureSource(where=WHERE, given=given).known().sha256

    same = [saved(), saved(compress_level=0), data_address(saved()), saved(kind="WEBP", lossless=True), image()]
    assert len({digest(given) for given in same}) == 1
    others = [image(seed=1), image(size=(8, 12)), saved(kind="JPEG", quality=30)]
    assert len({digest(given) for given in (*same, *others)}) == 1 + len(others)


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    pictures._pillow.cache_clear()
    with pytest.raises(
        EdgespecError, match=r"Pillow, which is not installed\. Install it: pip install 'edgespec\[images\]'"
    ):
        read(FILES["PNG"])
    monkeypatch.undo()
    assert read(FILES["PNG"]).size == (64, 48)


def test_no_picture_is_decoded_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("its pixels were read")

    for kind in ("PngImagePlugin.PngImageFile", "GifImagePlugin.GifImageFile", "JpegImagePlugin.JpegImageFile"):
        monkeypatch.setattr(f"PIL.{kind}.load", load)
    for given in (png_of_size(9_000, 9_000), gif_of_size(9_000, 9_000), jpeg_of_size(9_000, 9_000)):
        with pytest.raises(EdgespecError, match="9000 x 9000"):
            read(given)
