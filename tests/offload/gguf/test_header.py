"""A GGUF file's settings and tensors are found by its header, and a damaged file is refused by name."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import CheckpointError
from offload.gguf.header import TextList, read_gguf
from tests.offload.gguf.files import gguf_bytes, text_bytes, write_gguf

SETTINGS = {"general.architecture": "llama", "llama.block_count": 2, "tokens": ["a", "bé"], "numbers": [1, 2]}
TENSORS = [("a.weight", (3, 2), 0, bytes(24)), ("b.weight", (2, 32), 8, bytes(68))]


@pytest.mark.parametrize("version", [2, 3])
def test_settings_and_places_are_read(tmp_path: Path, version: int) -> None:
    header = read_gguf(write_gguf(tmp_path / "a.gguf", SETTINGS, TENSORS, version=version))
    tokens = header.settings["tokens"]
    assert isinstance(tokens, TextList)
    assert {**header.settings, "tokens": tokens.read()} == SETTINGS
    first, second = header.tensors.values()
    assert (first.shape, first.block.name, first.num_bytes) == ((3, 2), "F32", 24)
    assert (second.shape, second.block.name, second.num_bytes) == ((2, 32), "Q8_0", 68)
    assert second.offset - first.offset == 32
    assert second.offset + second.num_bytes == header.path.stat().st_size


def _with(**changes: object) -> bytes:
    return gguf_bytes(SETTINGS, TENSORS, **changes)


def _counts(tensors: int, settings: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, settings) + bytes(64)


ONE_SETTING = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text_bytes("k")
DAMAGED = {
    "not a GGUF file": (b"GGML" + bytes(60), "does not begin with GGUF"),
    "empty": (b"", "a.gguf"),
    "version": (_with(version=1), "version 1"),
    "big-endian": (_with(version=3 << 24), "big-endian"),
    "tensors without end": (_counts(1 << 60, 0), "truncated"),
    "settings without end": (_counts(0, 1 << 60), "truncated"),
    "a long key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(64), "truncated"),
    "a long text": (ONE_SETTING + struct.pack("<IQ", 8, 1 << 62), "'k'"),
    "a long list": (ONE_SETTING + struct.pack("<IIQ", 9, 8, 1 << 62), "'k'"),
    "lists in lists": (ONE_SETTING + struct.pack("<IIQ", 9, 9, 1), "'k'"),
    "unknown type of a setting": (ONE_SETTING + struct.pack("<I", 99), "'k'"),
    "a setting twice": (gguf_bytes([("k", 1), ("k", 2)], []), "'k' is stated twice"),
    "a tensor twice": (gguf_bytes({}, [("t", (8,), 0, bytes(32))] * 2), "'t' is listed twice"),
    "alignment": (gguf_bytes({"general.alignment": 24}, []), "general.alignment is 24"),
    "overlap": (_with(offsets=(0, 0)), "'b.weight' overlaps 'a.weight'"),
    "misaligned": (_with(offsets=(0, 33)), "'b.weight' lies at byte"),
    "unknown type": (gguf_bytes({}, [("t", (8,), 77, bytes(32))]), "'t' is of GGML's type 77"),
    "no whole blocks": (gguf_bytes({}, [("t", (2, 33), 8, bytes(72))]), r"'t' has the shape \[2, 33\], which Q8_0"),
    "no dimensions": (gguf_bytes({}, [("t", (), 0, bytes(8))]), "'t' has 0 dimensions"),
    "nothing in a dimension": (gguf_bytes({}, [("t", (0, 8), 0, bytes(8))]), "'t' has the shape"),
    "numbers beyond its end": (_with()[:-1], "truncated: tensor 'b.weight' ends at byte"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    content, reason = DAMAGED[damage]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_gguf(path)
    assert str(path) in caught.value.what


@given(place=st.integers(4, len(_with()) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(_with())))
def test_whatever_the_bytes_are_there_is_a_header_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: int
) -> None:
    content = bytearray(_with())
    content[place] = byte
    for damaged in (content, content[:cut]):
        path = tmp_path_factory.getbasetemp() / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            header = read_gguf(path)
        except CheckpointError:
            continue
        assert all(tensor.offset + tensor.num_bytes <= len(damaged) for tensor in header.tensors.values())


def _part(path: Path, number: int, count: int, *, tensors: int = 2) -> None:
    settings = {"split.no": number, "split.count": count, "split.tensors.count": tensors}
    write_gguf(path / f"m-{number + 1:05}-of-{count:05}.gguf", settings, TENSORS[number : number + 1])


def test_the_parts_of_a_split_model_are_one(tmp_path: Path) -> None:
    for number in range(2):
        _part(tmp_path, number, 2)
    header = read_gguf(tmp_path / "m-00002-of-00002.gguf")
    assert {name: tensor.file.name for name, tensor in header.tensors.items()} == {
        "a.weight": "m-00001-of-00002.gguf",
        "b.weight": "m-00002-of-00002.gguf",
    }
    assert header.path.name == "m-00001-of-00002.gguf"


def test_parts_that_are_missing_or_foreign_are_named(tmp_path: Path) -> None:
    _part(tmp_path, 0, 2)
    with pytest.raises(CheckpointError, match=r"1 of 2 parts .* missing .*m-00002-of-00002.gguf"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="it is one of 2 parts"):
        read_gguf(tmp_path / "alone.gguf")
    (tmp_path / "alone.gguf").rename(tmp_path / "m-00001-of-00002.gguf")
    write_gguf(tmp_path / "m-00002-of-00002.gguf", {"split.no": 0}, TENSORS[1:])
    with pytest.raises(CheckpointError, match=r"split\.no is 0, not 1"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
    _part(tmp_path, 1, 2)
    _part(tmp_path, 0, 2, tensors=3)
    with pytest.raises(CheckpointError, match="2 of 3 tensors"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
