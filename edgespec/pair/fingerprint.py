"""A digest of a checkpoint's weights: of all bytes of a small one, of pieces of every tensor of a large one.

It is kept with what tells that no file was written to since, so that the pieces are read once. How tensors are spread
over files makes no difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.user_paths import cache_folder, make_folder, written_whole
from offload.checkpoint import Checkpoint, TensorEntry
from offload.file_state import file_state, is_settled

SCHEMA = "edgespec.fingerprint/1"
WHOLE_CHECKPOINT_BYTES = 16 << 20  # up to which all is read
WHOLE_TENSOR_BYTES = 1 << 16  # up to which all of a tensor is read: norms, biases, scales
PIECE_BYTES = 1 << 12  # of a larger one
NUM_PIECES = 4  # spread over it evenly, from its first byte to its last
NUM_READERS = 8  # files at a time


def weights_digest(checkpoint: Checkpoint) -> str:
    """Return the digest in 64 hex digits; raises EdgespecError. Files that are not there have none."""
    entries = sorted(checkpoint.tensors.values(), key=lambda entry: (str(entry.file), entry.offset))
    files = [(path, list(those)) for path, those in itertools.groupby(entries, lambda entry: entry.file)]
    files = [(path, those) for path, those in files if path.is_file()]
    states = {os.path.relpath(path, checkpoint.folder): list(file_state(path.stat())) for path, _ in files}
    cached = _cache_file(checkpoint)
    digest = _read_cached(cached, states)
    if digest is None:
        digest = _digest(files, is_whole=checkpoint.num_bytes <= WHOLE_CHECKPOINT_BYTES)
        if all(is_settled(tuple(state)) for state in states.values()):
            _write_cached(cached, states, digest)
    return digest


def _digest(files: Iterable[tuple[Path, list[TensorEntry]]], *, is_whole: bool) -> str:
    found: dict[str, str] = {}
    try:
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for part in pool.map(lambda file: _file_digests(*file, is_whole=is_whole), files):
                found |= part
    except OSError as error:
        raise EdgespecError(
            "E_READ_FAILED", f"reading weights failed: {error}.", "Restore the file, or download it again."
        ) from error
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _file_digests(path: Path, entries: Iterable[TensorEntry], *, is_whole: bool) -> dict[str, str]:
    """Return a digest of each of a file's tensors, which are read in their order."""
    found = {}
    with path.open("rb", buffering=0) as file:
        for entry in entries:
            digest = hashlib.blake2b(digest_size=16)
            for start, end in _pieces(entry.num_bytes, is_whole=is_whole or entry.num_bytes <= WHOLE_TENSOR_BYTES):
                file.seek(entry.offset + start)
                digest.update(file.read(end - start))
            found[entry.name] = digest.hexdigest()
    return found


def _pieces(num_bytes: int, *, is_whole: bool) -> Iterator[tuple[int, int]]:
    if is_whole:
        yield from ((start, min(start + (1 << 20), num_bytes)) for start in range(0, num_bytes, 1 << 20))
        return
    for number in range(NUM_PIECES):
        start = number * (num_bytes - PIECE_BYTES) // (NUM_PIECES - 1)
        yield start, start + PIECE_BYTES


def _cache_file(checkpoint: Checkpoint) -> Path:
    """Return where the digest is kept of these tensors of the folder: a target's own layer is a part of its files."""
    whole = [str(checkpoint.folder.resolve()), *sorted(entry.name for entry in checkpoint.tensors.values())]
    name = hashlib.blake2b(os.fsencode("\0".join(whole)), digest_size=8).hexdigest()
    return cache_folder() / "fingerprints" / f"{name}.json"


def _read_cached(path: Path, states: dict[str, list[int]]) -> str | None:
    """Return the digest that was kept of files in these states."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_of_these = content["schema"] == SCHEMA and content["files"] == states
        return str(content["digest"]) if is_of_these else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or damaged
        return None


def _write_cached(path: Path, states: dict[str, list[int]], digest: str) -> None:
    """Write a digest; a home that cannot be written ends nothing."""
    content = {"schema": SCHEMA, "files": states, "digest": digest}
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        with written_whole(path) as partial:
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
