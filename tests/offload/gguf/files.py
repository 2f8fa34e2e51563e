"""GGUF files for tests, written byte by byte from the format's description."""

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.gguf.header import GgufTensor, TextList, read_gguf

UINT32, INT32, FLOAT32, BOOL, TEXT, LIST, UINT64 = 4, 5, 6, 7, 8, 9, 10
ALIGNMENT = 32


def text_bytes(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value_bytes(value: Any) -> bytes:
    """A value with its type in front; lists are of texts, or of numbers."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<Ii", INT32, value) if value < 0 else struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + text_bytes(value)
    kind, *_ = struct.unpack("<I", value_bytes(value[0])[:4])
    return struct.pack("<IIQ", LIST, kind, len(value)) + b"".join(value_bytes(each)[4:] for each in value)


def gguf_bytes(
    settings: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Sequence[tuple[str, tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
    offsets: Sequence[int] | None = None,
) -> bytes:
    """The bytes of a file; a tensor is its name, its shape as torch has it, GGML's type and its content."""
    pairs = list(settings.items() if isinstance(settings, Mapping) else settings)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(text_bytes(key) + value_bytes(value) for key, value in pairs)
    content = b""
    for number, (name, shape, kind, numbers) in enumerate(tensors):
        content += bytes(-len(content) % ALIGNMENT)
        offset = len(content) if offsets is None else offsets[number]
        head += text_bytes(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        content += numbers
    return head + bytes(-len(head) % ALIGNMENT) + content


def write_gguf(path: Path, *arguments: Any, **named: Any) -> Path:
    path.write_bytes(gguf_bytes(*arguments, **named))
    return path


Change = Callable[
    [GgufTensor, bytes], "tuple[Any, ...] | None"
]  # -> name, content, perhaps GGML's type; None: left out


def copy_gguf(
    source: Path,
    path: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    change: Change = lambda tensor, content: (tensor.name, content),
    further: Sequence[tuple[str, tuple[int, ...], int, bytes]] = (),
) -> Path:
    """A file with other settings, of which None is left out, and with other tensors."""
    header, stored = read_gguf(source), source.read_bytes()
    every = {**header.settings, **(settings or {})}
    every = {key: value.read() if isinstance(value, TextList) else value for key, value in every.items()}
    tensors = []
    for tensor in header.tensors.values():
        found = change(tensor, stored[tensor.offset : tensor.offset + tensor.num_bytes])
        if found is not None:
            name, content, number = (*found, tensor.block.number)[:3]
            tensors.append((name, tensor.shape, number, content))
    return write_gguf(path, {key: one for key, one in every.items() if one is not None}, [*tensors, *further])
