"""Passes of few shapes: the same hidden states as other passes give, from operations that no number changes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from edgespec import Engine, TreeSettings
from edgespec.machine import device as device_module
from edgespec.machine.device import CudaGraphs
from edgespec.model import cuda_graphs as cuda_graphs
from edgespec.model.causal_model import CausalModel
from edgespec.model.cuda_graphs import ROWS, has_static_passes
from edgespec.pair.pair import open_pair
from tests.edgespec.model.reader import Reader
from tests.support.families import FAMILIES, make_model

STATIC = ["llama", "qwen2", "qwen3", "mistral", "phi3", "opt", "gpt2", "gpt-neox"]


def static_reader(family: str, seed: int = 0) -> Reader:
    return Reader.of(make_model(FAMILIES[family]()), seed, cuda_graphs=True)


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass."""
    read: list[int] = []
    run = CausalModel._run

    def counted(self: CausalModel, parts: Any, chunks: Any) -> Any:
        read.append(sum(part.count for part in parts))
        return run(self, parts, chunks)

    monkeypatch.setattr(CausalModel, "_run", counted)
    return read


@pytest.mark.parametrize("family", STATIC)
def test_trees_are_read_as_by_plain_forwards_over_their_paths(family: str, rows_read: list[int]) -> None:
    reader = static_reader(family)
    reader.read_prompt(21)
    for nodes, accepted in [(17, None), (5, 0), (40, None), (1, 0), (17, 3)]:
        reader.look(accepted, nodes=nodes)
    assert rows_read == [21, 32, 8, 64, 1, 32]


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {*STATIC, "llama-bias"}))
def test_windows_experts_and_shared_keys_pass_as_they_are(family: str, rows_read: list[int]) -> None:
    assert not has_static_passes(FAMILIES[family]().get_text_config(decoder=True))
    reader = static_reader(family)
    reader.read_prompt(9)
    reader.look(None, nodes=5)
    assert rows_read == [9, 5]


def test_a_cache_that_grows_is_read_on(monkeypatch: pytest.MonkeyPatch, rows_read: list[int]) -> None:
    monkeypatch.setattr("edgespec.model.causal_model.CAPACITY_ROWS", 32)
    reader = static_reader("llama")
    reader.read_prompt(5)
    for _ in range(9):
        reader.look(None, nodes=8)
        assert reader.target.cache.layers[0].capacity % 32 == 0
    assert reader.target.cache.layers[0].capacity > 32
    assert set(rows_read[1:]) == {8}


def test_rows_that_pad_have_a_place_where_the_others_just_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.model.causal_model.CAPACITY_ROWS", 32)
    reader = static_reader("llama")
    reader.read_prompt(27)
    reader.look(None, nodes=5)


def test_texts_take_turns() -> None:
    first = static_reader("llama")
    second = copy.copy(first)
    second.target = type(first.target)(first.causal)
    for reader, length in ((first, 9), (second, 30)):
        reader.read_prompt(length)
    for _ in range(3):
        first.look(None)
        second.look(None)


def test_several_texts_and_many_rows_pass_as_they_are(rows_read: list[int]) -> None:
    reader = static_reader("llama")
    reader.read_prompt(ROWS[-1] + 3)
    other = reader.causal.new_text()
    ids = torch.arange(5)
    reader.causal.read_text(other, ids)
    rows = [cuda_graphs.PassRows(cache=text, ids=ids[:2], positions=len(text.ids) + ids[:2]) for text in
            (reader.target.cache, other)]  # fmt: skip
    reader.causal.read(rows)
    assert rows_read == [ROWS[-1] + 3, 5, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_whose_draft_reads_so_gives_the_same_text(temperature: float, rows_read: list[int]) -> None:
    texts = []
    for uses_graphs in (False, True):
        rows_read.clear()
        with Engine.from_pair(
            open_pair(None, None), tree=TreeSettings(size=16), cuda_graphs=uses_graphs, self_check=False
        ) as engine:
            texts.append(engine.generate("import os\n", max_new_tokens=24, temperature=temperature, seed=3).token_ids)
    assert texts[0] == texts[1]
    assert rows_read.count(8) + rows_read.count(32) > 3


class Operations(TorchDispatchMode):
    """Notes what is launched: operations, the shapes that they are given, and all arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launched.append((func.name(), tree_map(lambda part: getattr(part, "shape", part), [args, kwargs])))
        return func(*args, **(kwargs or {}))


def test_what_is_launched_depends_on_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed graph could not follow: other rows, places and trees must be the same operations, without a wait."""
    launched: list[list[tuple[str, Any]]] = []

    def noted(_graphs: CudaGraphs, read: Any) -> Any:
        def again() -> Any:
            with Operations() as operations:
                found = read()
            launched.append(operations.launched)
            return found

        return again

    monkeypatch.setattr(CudaGraphs, "record", noted)
    reader = static_reader("llama")
    reader.read_prompt(11)
    for nodes in (17, 20, 32):
        reader.look(None, nodes=nodes)
    assert len(launched) == 3
    assert launched[0] == launched[1] == launched[2]
    names = {name for name, _ in launched[0]}
    assert "aten::index_copy_" in names
    assert not names & {"aten::nonzero", "aten::_local_scalar_dense", "aten::equal"}


@dataclass
class Recorder:
    """What stands in the place of CUDA's graphs: what was recorded, where, and on which device at that moment."""

    at: torch.device
    streams: list[Any] = field(default_factory=list)  # that were made
    pools: int = 0  # that were made
    captures: list[tuple[Any, Any, torch.device]] = field(default_factory=list)  # stream, pool, device
    replays: int = 0

    def new_stream(self, device: torch.device) -> Any:
        stream = SimpleNamespace(device=device, wait_stream=lambda _other: None)
        self.streams.append(stream)
        return stream

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.at = self.at, device
        yield
        self.at = before

    @contextmanager
    def capture(self, _graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.captures.append((stream, pool, self.at))
        yield

    def new_graph(self) -> Any:
        return SimpleNamespace(replay=lambda: setattr(self, "replays", self.replays + 1))


def test_graphs_of_a_device_are_recorded_there_on_one_stream_and_share_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    recorder = Recorder(at=first)
    for name, stand_in in {
        "Stream": recorder.new_stream,
        "stream": lambda _stream: nullcontext(),
        "current_stream": lambda device: SimpleNamespace(device=device, wait_stream=lambda _other: None),
        "graph_pool_handle": recorder.new_pool,
        "device": recorder.on,
        "graph": recorder.capture,
        "CUDAGraph": recorder.new_graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device_module._aside.cache_clear()
    of_a_cache, of_the_next = CudaGraphs(second), CudaGraphs(second)
    replays = [of_a_cache.record(lambda: torch.ones(1)) for _ in ROWS]
    replays += [of_the_next.record(lambda: torch.ones(1)) for _ in ROWS]
    device_module._aside.cache_clear()
    for replay in replays:
        replay()
    assert recorder.replays == len(replays)
    assert [stream.device for stream in recorder.streams] == [second]
    assert {device for _, _, device in recorder.captures} == {second}
    assert all(stream is recorder.streams[0] for stream, _, _ in recorder.captures)
    assert [pool for _, pool, _ in recorder.captures] == [1] * len(ROWS) + [2] * len(ROWS)
    assert recorder.at == first
