"""A fingerprint is of all that a model is: whatever differs in the weights tells two models apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.pair import fingerprint as room
from edgespec.pair import folder as folders
from edgespec.pair.fingerprint import WHOLE_TENSOR_BYTES, weights_digest
from edgespec.pair.folder import fingerprint, open_model
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.user_paths import cache_folder
from offload.checkpoint import TensorEntry, read_checkpoint


@contextmanager
def other_values(entry: TensorEntry, start: int, end: int) -> Iterator[None]:
    """Within this block bytes of a tensor have one bit changed each."""
    with entry.file.open("r+b") as file:
        file.seek(entry.offset + start)
        before = file.read(end - start)
        file.seek(entry.offset + start)
        file.write(bytes(byte ^ 1 for byte in before))
    yield
    with entry.file.open("r+b") as file:
        file.seek(entry.offset + start)
        file.write(before)


def test_one_value_of_any_tensor_of_a_small_checkpoint_is_seen(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair_folders[0], tmp_path / "elsewhere")
    before = fingerprint(open_model(pair_folders[0]))
    for number, entry in enumerate(read_checkpoint(folder).tensors.values()):
        at = (997 * number) % entry.num_bytes
        with other_values(entry, at, at + 1):
            assert fingerprint(open_model(folder)) != before, entry.name
    assert fingerprint(open_model(folder)) == before


def test_other_values_of_any_matrix_of_a_large_checkpoint_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "WHOLE_CHECKPOINT_BYTES", 0)
    checkpoint = read_checkpoint(shutil.copytree(DEMO_FOLDER / "target", tmp_path / "model"))
    before = weights_digest(checkpoint)
    sizes = [entry.num_bytes for entry in checkpoint.tensors.values()]
    assert min(sizes) <= WHOLE_TENSOR_BYTES < max(sizes)
    for entry in checkpoint.tensors.values():
        is_small = entry.num_bytes <= WHOLE_TENSOR_BYTES
        start, end = (entry.num_bytes - 1, entry.num_bytes) if is_small else (0, entry.num_bytes)
        with other_values(entry, start, end):
            assert weights_digest(checkpoint) != before, entry.name
    assert weights_digest(checkpoint) == before


@pytest.mark.parametrize("num_bytes", [WHOLE_TENSOR_BYTES + 1, 1_000_003])
def test_pieces_of_a_large_tensor_reach_from_its_first_byte_to_its_last(num_bytes: int) -> None:
    pieces = list(room._pieces(num_bytes, is_whole=False))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == num_bytes
    assert {end - start for start, end in pieces} == {room.PIECE_BYTES}
    assert len(pieces) == room.NUM_PIECES


def test_how_weights_are_spread_over_files_makes_no_difference(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair_folders[0], tmp_path / "model")
    before = fingerprint(open_model(folder))
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    assert fingerprint(open_model(folder)) == before


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read for a digest; files of any age are trusted."""
    monkeypatch.setattr(room, "is_settled", lambda _state: True)
    found: list[Path] = []
    read = room._file_digests

    def counted(path: Path, *rest: list[TensorEntry], is_whole: bool) -> dict[str, str]:
        found.append(path)
        return read(path, *rest, is_whole=is_whole)

    monkeypatch.setattr(room, "_file_digests", counted)
    return found


def test_weights_are_read_once_until_a_file_is_written_to(
    pair_folders: tuple[Path, Path], tmp_path: Path, reads: list[Path]
) -> None:
    folder = shutil.copytree(pair_folders[1], tmp_path / "model")
    before = weights_digest(read_checkpoint(folder))
    assert weights_digest(read_checkpoint(folder)) == before
    assert len(reads) == 1
    weights = folder / "model.safetensors"
    weights.touch()
    assert weights_digest(read_checkpoint(folder)) == before
    with other_values(read_checkpoint(folder).tensors["model.norm.weight"], 0, 1):
        assert weights_digest(read_checkpoint(folder)) != before
    assert len(reads) == 3
    shutil.copy(weights, tmp_path / "new")
    (tmp_path / "new").replace(weights)
    assert weights_digest(read_checkpoint(folder)) == before
    assert len(reads) == 4, "another file under its name"


def test_a_part_of_a_models_files_has_a_digest_of_its_own(pair_folders: tuple[Path, Path], reads: list[Path]) -> None:
    """As a target's own layer is: whichever is looked at first, both are what they are, and are kept."""
    whole = read_checkpoint(pair_folders[1])
    names = [name for name in whole.tensors if ".layers.0." in name]
    part = replace(whole, tensors={name: whole.tensors[name] for name in names})
    first = weights_digest(part)
    assert weights_digest(whole) != first
    assert len(reads) == 2
    assert weights_digest(part) == first
    assert len(reads) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "edgespec.fingerprint/0"}', "\x00", "null"])
def test_a_kept_digest_that_is_damaged_is_made_again(
    content: str, pair_folders: tuple[Path, Path], reads: list[Path]
) -> None:
    before = weights_digest(read_checkpoint(pair_folders[1]))
    (kept,) = (cache_folder() / "fingerprints").glob("*.json")
    kept.write_text(content)
    assert weights_digest(read_checkpoint(pair_folders[1])) == before
    assert len(reads) == 2
    assert json.loads(kept.read_text())["digest"] == before


def test_a_home_that_cannot_be_written_ends_nothing(
    pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    before = weights_digest(read_checkpoint(pair_folders[1]))
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file" / "below"))
    assert weights_digest(read_checkpoint(pair_folders[1])) == before


def test_of_files_that_were_written_just_now_nothing_is_kept(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The next write may leave the time as it is: file systems' clocks are coarse."""
    weights_digest(read_checkpoint(shutil.copytree(pair_folders[1], tmp_path / "model")))
    assert not (cache_folder() / "fingerprints").exists()


def test_an_open_models_fingerprint_is_made_once(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(folders, "weights_digest", lambda checkpoint: made.append(checkpoint.folder) or "0")
    model = open_model(pair_folders[0])
    assert fingerprint(model) == fingerprint(model)
    assert made == [pair_folders[0]]
