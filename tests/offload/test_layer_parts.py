"""Layers that come part by part are those that are copied whole, whatever their parameters are made of."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.errors import StreamError
from offload.layer_parts import parts_of
from offload.layer_store import LayerRecord, LayerStore, StoredTensor

NUM_NUMBERS = 600
F32 = torch.float32


@dataclass(frozen=True, slots=True)
class OneLess:
    """Numbers in float32 of which 1 is taken away, as of Gemma's norms in a GGUF file."""

    shape: tuple[int, ...]

    def write(self, stored: Tensor, out: Tensor) -> None:
        out.copy_(stored.view(F32) - 1)


def entry(path: Path, number: int, **named: object) -> TensorEntry:
    """The tensor of this number in a file of float32 numbers."""
    num_bytes = NUM_NUMBERS * F32.itemsize
    common = {"name": str(number), "dtype": F32, "shape": (NUM_NUMBERS,), "file": path, "num_bytes": num_bytes}
    return TensorEntry(**{**common, "offset": number * num_bytes, **named})


@pytest.fixture
def record(tmp_path: Path) -> LayerRecord:
    """A parameter as it lies, one that is computed, one of two tensors whose rows come in turn, and one more."""
    path = tmp_path / "weights"
    path.write_bytes(torch.randn(5 * NUM_NUMBERS).numpy().tobytes())
    stored = torch.uint8, (NUM_NUMBERS * F32.itemsize,)
    computed = entry(path, 1, dtype=stored[0], shape=stored[1], computed=OneLess((NUM_NUMBERS,)))
    turns = tuple(entry(path, number, shape=(NUM_NUMBERS, 1), is_in_turn=True) for number in (2, 3))
    pieces = {"plain": (entry(path, 0),), "computed": (computed,), "turns": turns, "last": (entry(path, 4),)}
    shapes = {name: (len(of) * NUM_NUMBERS,) for name, of in pieces.items()}
    tensors = {name: StoredTensor(pieces=of, shape=shapes[name], dtype=torch.bfloat16) for name, of in pieces.items()}
    return LayerRecord(index=0, tensors=tensors)


@pytest.mark.parametrize("part_bytes", [256, 1024, 1 << 20])
def test_parts_together_are_the_layer(part_bytes: int, record: LayerRecord) -> None:
    store = LayerStore({one.file for one in record.entries})
    whole = torch.zeros(record.flat_bytes, dtype=torch.uint8)
    store.copy(record, whole)
    in_parts = torch.zeros_like(whole)
    for part in parts_of(record, part_bytes):
        part.read(store, in_parts[part.start : part.end])
    assert in_parts.equal(whole)


def test_each_tensor_is_looked_at(record: LayerRecord) -> None:
    """A file that is written over between two readings is noticed, wherever it was."""
    (path,) = {one.file for one in record.entries}

    def read() -> None:
        store_samples: dict[TensorEntry, bytes] = {}
        for part in parts_of(record, 1024):
            memory = torch.zeros(part.end - part.start, dtype=torch.uint8)
            part.read(store, memory)
            part.add_samples(memory, store_samples)
        store.check_unchanged(record, [store_samples[one] for one in record.entries])

    store = LayerStore([path])
    read()
    read()
    for one in record.entries:
        before = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(one.offset)
            file.write(torch.randn(NUM_NUMBERS).numpy().tobytes())
        with pytest.raises(StreamError, match="written over"):
            read()
        with path.open("r+b") as file:
            file.write(before)
        read()
