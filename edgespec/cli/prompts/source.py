"""Where prompts come from: the bytes of a file or of stdin, what packs them, their text, and the format that it has."""

import bz2
import csv
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.validation import parse_json, shown

INPUT_FORMATS = ("auto", "text", "lines", "jsonl", "json", "csv", "tsv", "parquet")
SUFFIX_FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonlines": "jsonl", ".jl": "jsonl", ".json": "json", ".csv": "csv",
    ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
ROW_SOURCES = frozenset({"prompt", "messages", "turns", "body"})  # keys of which a row has one
PARQUET = b"PAR1"
UTF_16, UTF_32 = (b"\xff\xfe", b"\xfe\xff"), (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
# What packed files begin with -> their suffix, and what unpacks them
PACKED: dict[bytes, tuple[str, Callable[[bytes], bytes]]] = {
    b"\x1f\x8b": (".gz", gzip.decompress),
    b"BZh": (".bz2", bz2.decompress),
    b"\xfd7zXZ\0": (".xz", lzma.decompress),
}
# What other files begin with that hold no text -> what they are, and a way to text
BINARIES = {
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "Unpack it: zstd -d FILE, or zstdcat FILE | edgespec generate -."),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "Unpack it, or save the spreadsheet as CSV."),
    b"ARROW1": ("an Arrow file", "Save its table as Parquet or JSONL."),
    b"%PDF": ("a PDF", "Save its text."),
    b"GGUF": ("a GGUF model", "Give a file of prompts; a model goes with -m."),
}


def read_bytes(source: str, *, what: str) -> bytes:
    """Read a file's bytes, or stdin's for '-', unpacked; raises EdgespecError that says to give `what`."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except FileNotFoundError as error:
        raise EdgespecError("E_FILE_NOT_FOUND", f"there is no file '{source}'.", f"Give {what}.") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise EdgespecError("E_FILE_NOT_FOUND", f"cannot read '{source}' ({reason}).", f"Give {what}.") from error
    return _unpacked(data, source)


def is_stdin_waiting() -> bool:
    """Return whether something has come through stdin, and nobody has read it; False where that cannot be told."""
    try:
        import fcntl
        import termios

        waiting = fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, bytes(4))
        return not sys.stdin.isatty() and any(waiting)
    except (ImportError, OSError, ValueError):  # no such call, or no such file
        return False


def _unpacked(data: bytes, source: str) -> bytes:
    """Return the bytes that are packed, if need be more than once; raises EdgespecError."""
    for start, (suffix, unpack) in PACKED.items():
        if data.startswith(start):
            try:
                return _unpacked(unpack(data), source)
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                what = f"'{source}' cannot be unpacked as {suffix}: {error}."
                raise EdgespecError("E_PROMPT_INVALID", what, "Save it again.") from error
    return data


def decoded(data: bytes, source: str) -> str:
    """Return the text of bytes, without byte order mark and carriage returns; raises EdgespecError where it is none."""
    for start, (name, fix) in BINARIES.items():
        if data.startswith(start):
            raise EdgespecError("E_PROMPT_INVALID", f"'{source}' is {name}, and no text.", fix)
    encoding = "utf-32" if data.startswith(UTF_32) else "utf-16" if data.startswith(UTF_16) else "utf-8-sig"
    try:
        text = data.decode(encoding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        name = encoding.upper().removesuffix("-SIG")
        what = f"'{source}' line {line} is not {name}."
        raise EdgespecError("E_PROMPT_INVALID", what, "Save the file as UTF-8.") from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        what = f"'{source}' line {line} holds NUL characters, as no text does."
        raise EdgespecError("E_PROMPT_INVALID", what, "Save the file as UTF-8: it may be UTF-16 without its mark.")
    return text


def form_by_name(source: str) -> str:
    """Return the format that a file's suffix names, packed or not; 'text' for other names and stdin."""
    name = source.lower()
    for suffix, _ in PACKED.values():
        name = name.removesuffix(suffix)
    return SUFFIX_FORMATS.get(Path(name).suffix, "text") if name else "text"


def form_by_content(text: str) -> str | None:
    """Return 'jsonl' where every line is a JSON object, 'json' for a list of such, and None for any other text.

    Where the first line is a row, a wrong one below makes no prompt of them all: it is named when rows are read.
    """
    lines = [line for _, line in row_lines(text)]
    first = _json(lines[0]) if lines and lines[0].lstrip()[:1] == "{" else None
    if isinstance(first, dict) and (ROW_SOURCES & first.keys() or all(map(_is_object, lines))):
        return "jsonl"
    found = _json(text) if text.lstrip()[:1] == "[" else None
    is_rows = isinstance(found, list) and found and all(isinstance(row, dict) for row in found)
    return "json" if is_rows else None


def row_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines of rows that are not blank, with their numbers from 1, without marks that joined files leave."""
    lines = text.replace("\r", "\n").split("\n")  # JSON has no carriage return in a row
    marked = [(number, line.lstrip("\ufeff")) for number, line in enumerate(lines, 1)]
    return [(number, line) for number, line in marked if line.strip()]


def table_rows(text: str, *, delimiter: str, source: str) -> list[dict[str, Any]]:
    """Return the rows of a table of text, by the names of its first line; raises EdgespecError."""
    text = text.lstrip("\ufeff")
    if not text.strip():
        return []
    first = text.split("\n", 1)[0]
    cuts = (delimiter, ";", "\t", ",")  # spreadsheets of some countries write others than a file's name says
    delimiter = next((cut for cut in cuts if ROW_SOURCES & {name.strip(' "') for name in first.split(cut)}), delimiter)
    csv.field_size_limit(2**31 - 1)
    try:
        names, *records = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter, strict=True) if row]
    except (csv.Error, ValueError) as error:
        what = f"'{source}' is no table ({error})."
        raise EdgespecError("E_PROMPT_INVALID", what, "Give --input-format text or lines, if it is text.") from error
    names = [name.strip() for name in names]
    if not ROW_SOURCES & set(names) or len(set(names)) < len(names):
        what = "names a column twice" if len(set(names)) < len(names) else 'has no column "prompt"'
        what = f"'{source}' is a table that {what}: its first line is {shown(names)}."
        raise EdgespecError("E_PROMPT_INVALID", what, "Correct that line, or give --input-format text or lines.")
    for number, record in enumerate(records, 1):
        if len(record) != len(names):
            what = f"row {number} of '{source}' has {len(record)} columns, and its first line names {len(names)}."
            raise EdgespecError("E_PROMPT_INVALID", what, 'Put texts that hold the separator in "quotes".')
    return [{name: cell for name, cell in zip(names, record, strict=True) if cell != ""} for record in records]


def parquet_rows(data: bytes, source: str) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file, without values that are null; raises EdgespecError."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        what = f"'{source}' is a Parquet file, and needs the library pyarrow, which is not installed."
        raise EdgespecError("E_PROMPT_INVALID", what, "Install it: pip install 'edgespec[parquet]'.") from error
    try:
        rows: Sequence[Any] = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are among them
        what = f"'{source}' is damaged, or no Parquet file: {' '.join(str(error).split())}."
        raise EdgespecError("E_PROMPT_INVALID", what, "Save it again.") from error
    return [_without_null(row) for row in rows]


def _without_null(value: Any) -> Any:
    """Return a value without the fields that its table's other rows have."""
    if isinstance(value, dict):
        return {name: _without_null(part) for name, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value


def _is_object(line: str) -> bool:
    return line.lstrip()[:1] == "{" and isinstance(_json(line), dict)


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None
