"""Headers are read and checked; no weight is."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.checkpoint import read_checkpoint
from offload.errors import CheckpointError
from offload.file_names import INDEX_NAME
from offload.layer_store import LayerStore
from tests.support.damage import (
    ADAPTER,
    POINTER,
    Damage,
    both,
    removed,
    shard_of,
    shard_written,
    stored_in,
    written,
)  # fmt: skip


@pytest.fixture
def folder(pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A sharded checkpoint to damage."""
    return shutil.copytree(pair_folders[0], tmp_path / "model")


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


INDEX_MAP = '{"weight_map": {"model.norm.weight": %s}}'
NESTED = b"[" * 100_000


def described(name: str, value: object) -> Damage:
    """The first tensor of the first shard, otherwise described."""

    def change(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        header[next(key for key in header if key != "__metadata__")][name] = value
        new = json.dumps(header).encode()
        return struct.pack("<Q", len(new)) + new + data[8 + length :]

    return shard_written(0, change)


def index_a_folder(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    (folder / INDEX_NAME).mkdir()


def tensor_moved(folder: Path) -> None:
    stored_in("model.norm.weight.extra", shard_of(folder, 0).name)(folder)


@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (shutil.rmtree, "E_MODEL_NOT_FOUND", "model"),
        (removed("*"), "E_NO_SAFETENSORS", "model.safetensors"),
        (both(removed("*"), written("pytorch_model.bin", "x")), "E_NO_SAFETENSORS", "pytorch_model.bin"),
        (removed("*-00001-of-*"), "E_SHARD_MISSING", "-00001-of-"),
        (shard_written(0, lambda data: data[:-100]), "E_SHARD_TRUNCATED", "bytes of the"),
        (shard_written(0, lambda data: data[:50]), "E_SHARD_TRUNCATED", "header"),
        (shard_written(0, lambda _: b""), "E_SHARD_TRUNCATED", "0 bytes"),
        (shard_written(0, lambda data: data[:8] + b"?" * 32 + data[40:]), "E_SHARD_INVALID", "-00001-of-"),
        (stored_in("model.norm.weight", "../../etc/passwd"), "E_SHARD_OUTSIDE", "../../etc/passwd"),
        *((written(INDEX_NAME, content), "E_INDEX_INVALID", INDEX_NAME) for content in ("{", "[]", NESTED)),
        (index_a_folder, "E_INDEX_INVALID", INDEX_NAME),
        (written(INDEX_NAME, INDEX_MAP % '["a"]'), "E_INDEX_INVALID", "model.norm.weight"),
        (written(INDEX_NAME, INDEX_MAP % json.dumps("a" * 5_000)), "E_SHARD_MISSING", "aaaa"),
        (shard_written(0, lambda _: struct.pack("<Q", len(NESTED)) + NESTED), "E_SHARD_INVALID", "nested"),
        (described("data_offsets", [0.0, 128.0]), "E_SHARD_INVALID", "no whole numbers"),
        (described("shape", ["3", "2"]), "E_SHARD_INVALID", "no whole numbers"),
        (described("data_offsets", [0, float("inf")]), "E_SHARD_INVALID", "no whole numbers"),
        (described("dtype", ["F32"]), "E_SHARD_INVALID", "-00001-of-"),
        (written("adapter_config.json", ADAPTER), "E_ADAPTER", "acme/base-7b"),
        (
            both(removed("*"), written("adapter_config.json", "{}"), written("adapter_model.safetensors", "x")),
            "E_ADAPTER",
            "no whole model",
        ),
        (shard_written(0, lambda _: POINTER.encode()), "E_LFS_POINTER", "-00001-of-"),
        (written(INDEX_NAME, POINTER), "E_LFS_POINTER", INDEX_NAME),
        (written("model.safetensors", POINTER), "E_LFS_POINTER", "model.safetensors"),
        (tensor_moved, "E_SHARD_INCOMPLETE", "model.norm.weight.extra"),
    ],
)
def test_damage_is_named_with_its_code(folder: Path, damage: Damage, code: str, named: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert caught.value.code == code
    assert named in caught.value.what
    assert caught.value.fix
