"""Headers are read and checked; no weight is."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.checkpoint import INDEX_NAME, read_checkpoint
from offload.errors import CheckpointError
from offload.layer_store import LayerStore

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"


@pytest.fixture
def folder(pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A sharded checkpoint to damage."""
    return shutil.copytree(pair_folders[0], tmp_path / "model")


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def test_every_tensor_is_found_and_views_equal_what_safetensors_reads(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    expected = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    checkpoint = read_checkpoint(folder)
    assert checkpoint.tensors.keys() == expected.keys()
    store = LayerStore(shards)
    for name, entry in checkpoint.tensors.items():
        assert torch.equal(store.view(entry), expected[name])
    assert checkpoint.num_bytes == sum(t.numel() * t.element_size() for t in expected.values())


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, 5, dtype=torch.float16)}, tmp_path / "model.safetensors")
    entry = read_checkpoint(tmp_path).tensors["a"]
    assert (entry.shape, entry.dtype, entry.num_bytes) == ((3, 5), torch.float16, 30)


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def no_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def only_bin(folder: Path) -> None:
    no_files(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")


def missing_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def truncated_shard(folder: Path) -> None:
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-100])


def truncated_header(folder: Path) -> None:
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:50])


def empty_shard(folder: Path) -> None:
    first_shard(folder).write_bytes(b"")


def garbage_header(folder: Path) -> None:
    path = first_shard(folder)
    data = bytearray(path.read_bytes())
    data[8:40] = b"?" * 32
    path.write_bytes(bytes(data))


def shard_outside(folder: Path) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../../etc/passwd"
    path.write_text(json.dumps(index))


def index_no_json(folder: Path) -> None:
    (folder / INDEX_NAME).write_text("{")


def index_without_map(folder: Path) -> None:
    (folder / INDEX_NAME).write_text("[]")


def index_nested(folder: Path) -> None:
    (folder / INDEX_NAME).write_text("[" * 100_000)


def index_a_folder(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    (folder / INDEX_NAME).mkdir()


def shard_no_name(folder: Path) -> None:
    (folder / INDEX_NAME).write_text('{"weight_map": {"model.norm.weight": ["a"]}}')


def shard_of_a_long_name(folder: Path) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"model.norm.weight": "a" * 5_000}}))


def header_nested(folder: Path) -> None:
    deep = b"[" * 100_000
    first_shard(folder).write_bytes(struct.pack("<Q", len(deep)) + deep)


def changed_entry(folder: Path, name: str, value: object) -> None:
    """The first tensor of the first shard, otherwise described."""
    path = first_shard(folder)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[next(key for key in header if key != "__metadata__")][name] = value
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + length :])


def float_offsets(folder: Path) -> None:
    changed_entry(folder, "data_offsets", [0.0, 128.0])


def sizes_as_words(folder: Path) -> None:
    changed_entry(folder, "shape", ["3", "2"])


def infinite_offset(folder: Path) -> None:
    changed_entry(folder, "data_offsets", [0, float("inf")])


def dtype_a_list(folder: Path) -> None:
    changed_entry(folder, "dtype", ["F32"])


def adapter_beside(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "acme/base-7b"}')


def adapter_alone(folder: Path) -> None:
    no_files(folder)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"x")


def shard_a_pointer(folder: Path) -> None:
    first_shard(folder).write_text(POINTER)


def index_a_pointer(folder: Path) -> None:
    (folder / INDEX_NAME).write_text(POINTER)


def single_a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)


def tensor_moved(folder: Path) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight.extra"] = first_shard(folder).name
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (no_folder, "E_MODEL_NOT_FOUND", "model"),
        (no_files, "E_NO_SAFETENSORS", "model.safetensors"),
        (only_bin, "E_NO_SAFETENSORS", "pytorch_model.bin"),
        (missing_shard, "E_SHARD_MISSING", "-00001-of-"),
        (truncated_shard, "E_SHARD_TRUNCATED", "bytes of the"),
        (truncated_header, "E_SHARD_TRUNCATED", "header"),
        (empty_shard, "E_SHARD_TRUNCATED", "0 bytes"),
        (garbage_header, "E_SHARD_INVALID", "-00001-of-"),
        (shard_outside, "E_SHARD_OUTSIDE", "../../etc/passwd"),
        (index_no_json, "E_INDEX_INVALID", INDEX_NAME),
        (index_without_map, "E_INDEX_INVALID", INDEX_NAME),
        (index_nested, "E_INDEX_INVALID", INDEX_NAME),
        (index_a_folder, "E_INDEX_INVALID", INDEX_NAME),
        (shard_no_name, "E_INDEX_INVALID", "model.norm.weight"),
        (shard_of_a_long_name, "E_SHARD_MISSING", "aaaa"),
        (header_nested, "E_SHARD_INVALID", "nested"),
        (float_offsets, "E_SHARD_INVALID", "no whole numbers"),
        (sizes_as_words, "E_SHARD_INVALID", "no whole numbers"),
        (infinite_offset, "E_SHARD_INVALID", "no whole numbers"),
        (dtype_a_list, "E_SHARD_INVALID", "-00001-of-"),
        (adapter_beside, "E_ADAPTER", "acme/base-7b"),
        (adapter_alone, "E_ADAPTER", "no whole model"),
        (shard_a_pointer, "E_LFS_POINTER", "-00001-of-"),
        (index_a_pointer, "E_LFS_POINTER", INDEX_NAME),
        (single_a_pointer, "E_LFS_POINTER", "model.safetensors"),
        (tensor_moved, "E_SHARD_INCOMPLETE", "model.norm.weight.extra"),
    ],
)
def test_damage_is_named_with_its_code(folder: Path, damage: Callable[[Path], None], code: str, named: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert caught.value.code == code
    assert named in caught.value.what
    assert caught.value.fix
