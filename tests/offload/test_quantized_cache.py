"""The cache of quantised layers: found again, never half there, whoever dies or comes at the same time."""

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from offload import quantized_cache
from offload.checkpoint import Checkpoint, read_checkpoint
from offload.errors import CheckpointError
from offload.quantized_cache import load_or_quantize
from tests.offload.streaming import CPU, skeleton_of

# Quantises argv[1] into argv[2], argv[3] seconds a layer, and prints what it announces.
QUANTISE = """
import sys, time
from pathlib import Path
import torch
from transformers import AutoConfig
from offload import quantized_cache
from offload.checkpoint import read_checkpoint
from offload.skeleton import build_skeleton
folder, cache, layer_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
quantize = quantized_cache.quantize_layer
def slowly(*arguments):
    time.sleep(layer_s)
    return quantize(*arguments)
quantized_cache.quantize_layer = slowly
checkpoint = read_checkpoint(folder)
skeleton = build_skeleton(AutoConfig.from_pretrained(folder), checkpoint, dtype=torch.float32)
quantized_cache.load_or_quantize(
    skeleton, checkpoint, "int8", cache_folder=cache, device=torch.device("cpu"),
    announce=lambda *facts: print("announced", flush=True),
)
print("done", flush=True)
"""


def quantize(folder: Path, cache: Path, **options: Any) -> Checkpoint:
    quant = options.pop("quant", "int8")
    return load_or_quantize(
        skeleton_of(folder), read_checkpoint(folder), quant, cache_folder=cache, device=CPU, **options
    )


def start(folder: Path, cache: Path, *, layer_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", QUANTISE, str(folder), str(cache), str(layer_s)], stdout=subprocess.PIPE, text=True
    )


def announced(calls: list[tuple[Path, int, int]]) -> Callable[[Path, int, int], None]:
    return lambda *facts: calls.append(facts)


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "quantized").iterdir() if path.name.endswith(".partial")]


@pytest.fixture
def target(pair_folders: tuple[Path, Path]) -> Path:
    return pair_folders[0]


def test_the_size_is_announced_once_and_the_result_found_again(target: Path, tmp_path: Path) -> None:
    calls: list[tuple[Path, int, int]] = []
    first = quantize(target, tmp_path, announce=announced(calls))
    again = quantize(target, tmp_path, announce=announced(calls))
    assert len(calls) == 1
    folder, num_bytes, free_bytes = calls[0]
    written = sum(path.stat().st_size for path in folder.iterdir())
    assert num_bytes <= written < num_bytes + 4096 * 3  # headers
    assert free_bytes > num_bytes
    assert first.tensors == again.tensors
    # A cache may be shared: files have the rights of their folder.
    assert {path.stat().st_mode & 0o666 for path in folder.iterdir()} == {folder.stat().st_mode & 0o666}


def test_another_format_and_other_weights_have_a_place_of_their_own(target: Path, tmp_path: Path) -> None:
    calls: list[tuple[Path, int, int]] = []
    quantize(target, tmp_path, announce=announced(calls))
    quantize(target, tmp_path, announce=announced(calls), quant="nf4")
    other = shutil.copytree(target, tmp_path / target.name)
    shard = sorted(other.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = max(tensors, key=lambda key: tensors[key].numel())
    tensors[name] *= 1.01
    save_file(tensors, shard, metadata={"format": "pt"})
    quantize(other, tmp_path, announce=announced(calls))
    assert len({folder for folder, _, _ in calls}) == 3


def test_the_same_weights_elsewhere_share_the_place(target: Path, tmp_path: Path) -> None:
    calls: list[tuple[Path, int, int]] = []
    quantize(target, tmp_path, announce=announced(calls))
    quantize(shutil.copytree(target, tmp_path / "moved" / "renamed"), tmp_path, announce=announced(calls))
    assert len(calls) == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, Path.unlink, empty])
def test_a_damaged_result_is_made_again(damage: Callable[[Path], object], target: Path, tmp_path: Path) -> None:
    calls: list[tuple[Path, int, int]] = []
    first = quantize(target, tmp_path, announce=announced(calls))
    damage(calls[0][0] / "layer-00001.safetensors")
    again = quantize(target, tmp_path, announce=announced(calls))
    assert len(calls) == 2
    assert again.tensors == first.tensors


def test_left_overs_are_removed_before_the_free_space_is_counted(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, int, int]] = []
    quantize(target, tmp_path, announce=announced(calls))
    folder = calls[0][0]
    folder.rename(folder.with_name(f"{folder.name}.partial"))
    usage = shutil.disk_usage(tmp_path)

    def nothing_free_beside_a_left_over(_path: Path) -> Any:
        return usage._replace(free=1000 if leftovers(tmp_path) else usage.free)

    monkeypatch.setattr(shutil, "disk_usage", nothing_free_beside_a_left_over)
    quantize(target, tmp_path, announce=announced(calls))
    assert len(calls) == 2


@pytest.mark.parametrize("quant", ["int8", "nf4", "int4"])
def test_files_are_valid_and_packed_tensors_begin_where_cache_lines_do(
    quant: str, target: Path, tmp_path: Path
) -> None:
    found = quantize(target, tmp_path, quant=quant)
    files = {entry.file for entry in found.tensors.values() if tmp_path in entry.file.parents}
    assert files
    for file in files:
        own = {name: entry for name, entry in found.tensors.items() if entry.file == file}
        assert {name: tensor.shape for name, tensor in load_file(file).items()} == {
            name: entry.shape for name, entry in own.items()
        }
        assert all(entry.offset % 64 == 0 for entry in own.values() if entry.num_bytes % 64 == 0)


def test_a_killed_process_leaves_nothing_that_the_next_one_minds(target: Path, tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    with start(target, tmp_path, layer_s=1.0) as process:
        while not list(tmp_path.glob("quantized/*.partial/*.safetensors")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    assert leftovers(tmp_path)
    quantize(target, tmp_path)
    assert not leftovers(tmp_path)


def test_two_processes_at_once_do_the_work_once(target: Path, tmp_path: Path) -> None:
    """The second comes while the first is at work, and waits for it."""
    calls: list[tuple[Path, int, int]] = []
    with start(target, tmp_path, layer_s=0.3) as other:
        assert other.stdout
        assert other.stdout.readline() == "announced\n"
        quantize(target, tmp_path, announce=announced(calls))
        assert other.communicate(timeout=120)[0] == "done\n"
    assert other.returncode == 0
    assert not calls


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_nothing_half_written(
    failure: BaseException, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def fail_on_the_second(file: int) -> None:
        synced.append(file)
        if len(synced) > 1:
            raise failure

    monkeypatch.setattr(quantized_cache, "sync_to_disk", fail_on_the_second)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else CheckpointError
    with pytest.raises(expected) as caught:
        quantize(target, tmp_path)
    if isinstance(caught.value, CheckpointError):
        assert caught.value.code == "E_CACHE"
        assert "No space left" in caught.value.what
    assert not leftovers(tmp_path)
    monkeypatch.undo()
    quantize(target, tmp_path)


def test_a_disk_that_is_too_small_is_refused_before_writing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="1000 are free"):
        quantize(target, tmp_path)
    assert not leftovers(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(target: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="quantized"):
        quantize(target, tmp_path)
    tmp_path.chmod(0o700)
