"""The header of a GGUF file: its settings, and where each tensor lies. No weight is read.

Source: docs/gguf.md of ggml. Numbers are little-endian. Versions 2 and 3 are the same in this byte order. Lists of
texts, as a vocabulary's, are walked over here and read when they are needed.
"""

import functools
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError
from offload.file_state import FileState, file_state
from offload.formats.gguf_blocks import BY_NUMBER, BlockType
from offload.gguf.files import MAGIC, parts_of
from offload.lfs_pointer import is_pointer, pointer_error

VERSIONS = (2, 3)
ALIGNMENT_BYTES = 32  # of a tensor's place, where the file states none
MAX_DIMENSIONS = 4
MAX_REMEMBERED = 2  # headers: of a target and its draft
MAX_NAME_BYTES = 1 << 16  # of keys and tensors, as in ggml
MAX_SHOWN = 100  # characters of a name in an error
TOKENS = "tokenizer.ggml.tokens"
LEAST_SETTING_BYTES = 13  # of one: the length of a key, a type, a byte
LEAST_TENSOR_BYTES = 24  # of the place of one: the length of a name, dimensions, type, offset
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class TextList:
    """A list of texts that was not read yet."""

    file: Path
    offset: int
    num_bytes: int
    count: int

    def read(self) -> list[str]:
        """Return the texts; bytes that are no UTF-8 are replaced."""
        texts: list[str] = []
        length_at: Callable[[bytes, int], tuple[int]] = struct.Struct("<Q").unpack_from
        place = 0
        with _mapped(self.file) as data:
            content = data[self.offset : self.offset + self.num_bytes]
        for _ in range(self.count):  # a vocabulary has hundreds of thousands
            end = place + 8 + length_at(content, place)[0]
            texts.append(content[place + 8 : end].decode("utf-8", "replace"))
            place = end
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """The place of one tensor; the shape has rows first, as torch has it."""

    name: str
    block: BlockType
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufHeader:
    """Settings and tensors of a file, or of all parts of a split model, whose first part has the settings.

    It is shared by all who read the file: nobody changes it.
    """

    path: Path  # of the first part
    settings: Mapping[str, Any]  # numbers, texts, lists of numbers, or `TextList`
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The name that llama.cpp has for the architecture."""
        return str(self.settings.get("general.architecture"))

    @property
    def missing_bytes(self) -> int:
        """The bytes by which the files are too short: of those whose header alone is read."""
        return sum(max(0, end - file.stat().st_size) for file, (end, _) in self.ends().items())

    def ends(self) -> dict[Path, tuple[int, str]]:
        """Return where the tensors of each file end, and the name of the last."""
        found: dict[Path, tuple[int, str]] = {}
        for tensor in self.tensors.values():
            end = tensor.offset + tensor.num_bytes
            found[tensor.file] = max(found.get(tensor.file, (0, "")), (end, tensor.name))
        return found

    def has_tensor(self, end: str) -> bool:
        """Return whether the name of some tensor ends so."""
        return any(name.endswith(end) for name in self.tensors)


def read_gguf(path: Path, *, is_whole: bool = True) -> GgufHeader:
    """Return the header of a file and of the parts that belong to it; raises CheckpointError.

    A file that ends before its tensors do is refused, but where it need not be whole.
    """
    parts = tuple(parts_of(path))
    for pointer in filter(is_pointer, parts):
        raise pointer_error(pointer)
    try:
        states = tuple(file_state(part.stat()) for part in parts)
    except OSError as error:
        raise _invalid(path, str(error)) from error
    header = _read_parts(path, parts, states)
    if is_whole:
        _check_whole(header)
    return header


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _read_parts(path: Path, parts: tuple[Path, ...], _states: tuple[FileState, ...]) -> GgufHeader:
    """Return the header of files in these states; of a model that is opened, several rooms need it."""
    headers = [_read_part(part) for part in parts]
    settings = headers[0].settings
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        if len(parts) > 1 and header.settings.get("split.no") != number:
            raise _invalid(parts[number], f"split.no is {header.settings.get('split.no')}, not {number}")
        twice = next((name for name in header.tensors if name in tensors), None)
        if twice is not None:
            raise _invalid(parts[number], f"tensor '{twice[:MAX_SHOWN]}' is also in '{tensors[twice].file.name}'")
        tensors |= header.tensors
    if settings.get("split.count", 1) not in {len(parts), 0}:
        raise _invalid(path, f"it is one of {settings['split.count']} parts, whose names end in -00001-of-0000N.gguf")
    if settings.get("split.tensors.count", len(tensors)) != len(tensors):
        raise _invalid(path, f"its parts have {len(tensors)} of {settings['split.tensors.count']} tensors")
    return GgufHeader(path=parts[0], settings=settings, tensors=tensors)


def _check_whole(header: GgufHeader) -> None:
    for file, (end, last) in header.ends().items():
        num_bytes = file.stat().st_size
        if end > num_bytes:
            what = f"'{file}' is truncated: tensor '{last[:MAX_SHOWN]}' ends at byte {end} of {num_bytes}."
            raise CheckpointError("E_SHARD_TRUNCATED", what, "Download the file again.")


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_part(path: Path) -> GgufHeader:
    try:
        with _mapped(path) as data:
            return _header(path, _Reader(data))
    except (OSError, ValueError, struct.error) as error:
        raise _invalid(path, str(error)) from error


def _invalid(path: Path, reason: str) -> CheckpointError:
    what = f"'{path}' is not a valid GGUF file: {reason}."
    return CheckpointError("E_SHARD_INVALID", what, "Download the file again.")


class _Reader:
    """Reads numbers and texts one after another; raises ValueError beyond the end."""

    def __init__(self, data: mmap.mmap, place: int = 0) -> None:
        self.data, self.place = data, place

    def numbers(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        self.check_left(size)
        found = struct.unpack_from(f"<{form}", self.data, self.place)
        self.place += size
        return found

    def text(self, *, max_bytes: int | None = None, errors: str = "strict") -> str:
        (length,) = self.numbers("Q")
        self.check_left(length)
        if max_bytes is not None and length > max_bytes:
            raise ValueError(f"a name has {length} bytes")
        self.place += length
        return self.data[self.place - length : self.place].decode("utf-8", errors=errors)

    def check_left(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.place:
            raise ValueError(f"it is truncated: {num_bytes} bytes from {self.place} on do not fit {len(self.data)}")

    def value(self, path: Path, kind: int) -> Any:
        if kind == _TEXT:
            return self.text(errors="replace")
        if kind == _LIST:
            return self._list(path)
        if kind not in _SCALARS:
            raise ValueError(f"there is no type {kind}")
        return self.numbers(_SCALARS[kind])[0]

    def _list(self, path: Path) -> TextList | list[Any]:
        kind, count = self.numbers("IQ")
        if kind in _SCALARS:
            self.check_left(count * struct.calcsize(_SCALARS[kind]))
            return list(self.numbers(f"{count}{_SCALARS[kind]}"))
        if kind != _TEXT:
            raise ValueError(f"there are no lists of type {kind}")
        self.check_left(count * 8)
        start, place, num_bytes = self.place, self.place, len(self.data)
        length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(count):  # a vocabulary has hundreds of thousands
            if place + 8 > num_bytes:
                break
            place += 8 + length_at(self.data, place)[0]
        self.check_left(place - start)
        self.place = place
        return TextList(file=path, offset=start, num_bytes=place - start, count=count)


def first_settings(path: Path) -> dict[str, Any]:
    """Return a file's settings up to its tokens, of which the number is given in their place; raises CheckpointError.

    This takes less than a hundredth of the time of a whole header, most of which is a walk over the tokens.
    """
    try:
        with _mapped(path) as data:
            reader = _Reader(data)
            _, num_settings = _counts(reader)
            settings: dict[str, Any] = {}
            for _ in range(num_settings):
                key, (kind,) = reader.text(max_bytes=MAX_NAME_BYTES), reader.numbers("I")
                if key == TOKENS:
                    settings[key] = reader.numbers("IQ")[1]
                    break
                settings[key] = reader.value(path, kind)
            return settings
    except (OSError, ValueError, struct.error) as error:
        raise _invalid(path, str(error)) from error


def _counts(reader: _Reader) -> tuple[int, int]:
    """Return how many tensors and settings a file states at its begin; raises ValueError for no such file."""
    if reader.data[:4] != MAGIC:
        raise ValueError("it does not begin with GGUF")
    reader.place = len(MAGIC)
    (version,) = reader.numbers("I")
    if version not in VERSIONS:
        order = "big-endian, or of" if not version & 0xFFFF else "of"
        raise ValueError(f"it is {order} version {version}, and {' and '.join(map(str, VERSIONS))} are read")
    num_tensors, num_settings = reader.numbers("QQ")
    reader.check_left(num_tensors * LEAST_TENSOR_BYTES + num_settings * LEAST_SETTING_BYTES)
    return num_tensors, num_settings


def _header(path: Path, reader: _Reader) -> GgufHeader:
    num_tensors, num_settings = _counts(reader)
    settings: dict[str, Any] = {}
    for _ in range(num_settings):
        key = reader.text(max_bytes=MAX_NAME_BYTES)
        try:
            value = reader.value(path, *reader.numbers("I"))
        except ValueError as error:
            raise ValueError(f"'{key[:MAX_SHOWN]}' cannot be read ({error})") from error
        if key in settings:
            raise ValueError(f"'{key[:MAX_SHOWN]}' is stated twice")
        settings[key] = value
    alignment = settings.get("general.alignment", ALIGNMENT_BYTES)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment}, no power of two from 8 on")
    found = [_tensor(path, reader) for _ in range(num_tensors)]
    start = -(-reader.place // alignment) * alignment
    return GgufHeader(path=path, settings=settings, tensors=_placed(path, found, start, alignment))


def _tensor(path: Path, reader: _Reader) -> GgufTensor:
    """Return a tensor with its offset from where tensors begin."""
    name = reader.text(max_bytes=MAX_NAME_BYTES)
    (dimensions,) = reader.numbers("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor '{name[:MAX_SHOWN]}' has {dimensions} dimensions")
    shape = tuple(reversed(reader.numbers(f"{dimensions}Q")))
    number, offset = reader.numbers("IQ")
    block = BY_NUMBER.get(number)
    if block is None:
        raise ValueError(f"tensor '{name[:MAX_SHOWN]}' is of GGML's type {number}, which edgespec does not read")
    if not all(shape) or shape[-1] % block.weights:
        what = f"has the shape {list(shape)}, which {block.name} with blocks of {block.weights} cannot have"
        raise ValueError(f"tensor '{name[:MAX_SHOWN]}' {what}")
    num_bytes = math.prod(shape) // block.weights * block.num_bytes
    return GgufTensor(name=name, block=block, shape=shape, file=path, offset=offset, num_bytes=num_bytes)


def _placed(path: Path, found: list[GgufTensor], start: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors by name, with offsets in the file; raises where they cannot lie there."""
    tensors: dict[str, GgufTensor] = {}
    end, last = start, "the header"
    for tensor in sorted(found, key=lambda tensor: tensor.offset):
        name, offset = tensor.name, start + tensor.offset
        if name in tensors:
            raise ValueError(f"tensor '{name[:MAX_SHOWN]}' is listed twice")
        if offset % alignment:
            raise ValueError(f"tensor '{name[:MAX_SHOWN]}' lies at byte {offset}, no multiple of {alignment}")
        if offset < end:
            raise ValueError(f"tensor '{name[:MAX_SHOWN]}' overlaps {last}")
        end, last = offset + tensor.num_bytes, f"'{name[:MAX_SHOWN]}'"
        tensors[name] = GgufTensor(
            name=name, block=tensor.block, shape=tensor.shape, file=path, offset=offset, num_bytes=tensor.num_bytes
        )
    return tensors
