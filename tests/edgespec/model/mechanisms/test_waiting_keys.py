"""Keys and values that wait in RAM: what attention reads of them is what it would read where they stay.

A simulated device does its work as late, and in as odd an order, as a real one may, so a wait that is missing is a
wrong row for some of the orders that hypothesis chooses.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import FalconConfig, PretrainedConfig

from edgespec.model.causal_model import CausalModel
from edgespec.model.mechanisms.waiting_keys import KeyStream, WaitingRows
from edgespec.model.pass_rows import next_rows
from edgespec.model.target import Target
from edgespec.model.text_cache import TextCache, num_in_place
from edgespec.placement.cache_memory import waiting_windows
from edgespec.tree.token_tree import TokenTree
from tests.edgespec.model.reader import random_tree
from tests.support.families import FAMILIES, RECURRENT, SMALL, make_model
from tests.support.simulated_device import SimulatedDevice

NUM_LAYERS, WAITING = 4, (0, 2, 3)
HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 3, 2
ROW_BYTES = 4 * HEADS * (KEY_WIDTH + VALUE_WIDTH)
STEP_ROWS = 4
CHOICES = st.lists(st.integers(0, 8), min_size=1, max_size=40)


class AbandonedError(Exception):
    """Ends a pass from within."""


class InTurn(TorchFunctionMode):
    """Writes new rows on the simulated device when its stream comes to them, as kernels do."""

    def __init__(self, stream: KeyStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        slots = self.stream._slots
        if func is not Tensor.__setitem__ or slots is None or not is_part(args[0], slots._slots[0]):
            return func(*args, **(kwargs or {}))

        def write() -> None:
            with torch._C.DisableTorchFunction():
                func(*args)

        return self.stream.device.current_stream().give(write)


def is_part(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """New rows of each text, the nodes of which some become text, and where the pass is left."""

    counts: tuple[int, int]
    kept: tuple[int, ...]  # of the first rows of a text
    abandoned_at: int | None  # a layer
    chunk_rows: int
    left_at: int | None = None  # a layer, from which on the first text is left out


PASSES = st.lists(
    st.builds(
        Pass,
        counts=st.tuples(st.integers(1, 7), st.integers(1, 7)),
        kept=st.sets(st.integers(0, 6), max_size=5).map(lambda rows: tuple(sorted(rows))),
        abandoned_at=st.none() | st.integers(0, NUM_LAYERS - 1),
        left_at=st.none() | st.integers(0, NUM_LAYERS - 1),
        chunk_rows=st.integers(1, 8),
    ),
    min_size=1,
    max_size=5,
)


class Texts:
    """Two texts whose rows wait beside a device, and the same ones as they would be on it."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.stream = KeyStream(device, WAITING, row_bytes=ROW_BYTES)
        self.waiting = [TextCache(NUM_LAYERS, step_rows=STEP_ROWS, waiting=self.stream) for _ in range(2)]
        self.plain = [TextCache(NUM_LAYERS, step_rows=STEP_ROWS) for _ in range(2)]
        self.generator = torch.Generator().manual_seed(0)

    def run(self, one: Pass) -> None:
        """Append rows in a pass, layer by layer, and let those that are kept become text."""
        with suppress(AbandonedError), InTurn(self.stream), self.stream.rows(
            [(cache.layers, count) for cache, count in zip(self.waiting, one.counts, strict=True)]
        ):  # fmt: skip
            for layer in range(NUM_LAYERS):
                stays = one.left_at is None or layer < one.left_at
                for text, count in [*enumerate(one.counts)][0 if stays else 1 :]:
                    for first in range(0, count, one.chunk_rows):
                        self.append(layer, text, min(one.chunk_rows, count - first))
                if layer == one.abandoned_at:
                    raise AbandonedError
        for caches in (self.plain, self.waiting):
            self.commit(caches, one)

    def commit(self, caches: list[TextCache], one: Pass) -> None:
        """Let the rows of a pass become text that are to."""
        for cache, count in zip(caches, one.counts, strict=True):
            is_left_out = cache is caches[0] and one.left_at is not None
            if one.abandoned_at is not None or is_left_out:
                cache.truncate()
                continue
            rows = [row for row in one.kept if row < count]
            places = torch.tensor(rows, dtype=torch.long) + len(cache.ids)
            cache.commit(places, rows, num_in_place=num_in_place(rows))

    def append(self, layer: int, text: int, count: int) -> None:
        keys, values = (
            torch.randn(1, HEADS, count, width, generator=self.generator) for width in (KEY_WIDTH, VALUE_WIDTH)
        )
        expected = [part.clone() for part in self.plain[text].layers[layer].append(keys, values)]
        found = self.waiting[text].layers[layer].append(keys, values)

        def read() -> None:
            if not all(map(torch.equal, found, expected)):
                self.device.faults.append(f"layer {layer} of text {text} had other rows")

        self.device.current_stream().give(read)

    def check(self) -> None:
        self.device.finish()
        assert not self.device.faults
        for ours, theirs in zip(self.waiting, self.plain, strict=True):
            assert ours.ids == theirs.ids
            found, expected = ours.tensors(), theirs.tensors()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)


@settings(max_examples=80, deadline=None)
@given(choices=CHOICES, passes=PASSES, max_locked_bytes=st.none() | st.integers(0, 4000))
def test_whatever_a_pass_reads_is_what_the_text_has(
    choices: list[int], passes: list[Pass], max_locked_bytes: int | None
) -> None:
    texts = Texts(SimulatedDevice(choices, max_locked_bytes=max_locked_bytes))
    for one in passes:
        texts.run(one)
    texts.check()


# One for each way in which attention reads rows: whole, in windows, capped, text by text, latents, beside states
KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    **{family: FAMILIES[family] for family in ("llama", "mistral-window", "gemma2", "llama4", "gpt2")},
    **{family: RECURRENT[family] for family in ("qwen3-next", "kimi-linear")},
    "falcon": lambda: FalconConfig(**SMALL, alibi=False),
}


def read_both(models: list[CausalModel], targets: list[list[Target]], rows: Callable[[Target], Any]) -> None:
    """Read rows of all texts in one pass of each model, and compare the bits of what comes out."""
    found = [
        model.read([rows(target) for target in texts]) for model, texts in zip(models, targets, strict=True)
    ]  # fmt: skip
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_bits_that_they_have_where_rows_stay(kind: str, dtype: torch.dtype) -> None:
    """Prompts in parts, trees of two texts, a cut, a copy, and rows out of a file."""
    model = make_model(KINDS[kind](), dtype=dtype)
    models = [CausalModel(copy.deepcopy(model), device=torch.device("cpu"), chunk_rows=16) for _ in range(2)]
    layers = range(int(models[1].config.num_hidden_layers))
    models[1].waiting = KeyStream(
        SimulatedDevice(is_eager=True), [*layers][1:], row_bytes=4096, windows=waiting_windows(model)
    )
    targets = [[Target(of), Target(of)] for of in models]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(200, (count,), generator=generator).tolist() for count in (60, 35)]
    for of_model in targets:
        for target, prompt in zip(of_model, prompts, strict=True):
            target.begin(prompt)
    for count in (32, 16, 12):
        active = [[target for target in texts if target.num_unread] for texts in targets]
        read_both(models, active, lambda target, count=count: target.text_rows(count))
        for target in itertools.chain(*active):
            target.took_in(min(count, target.num_unread))
    for _ in range(3):
        tree = random_tree(5, generator, nodes=13)
        read_both(models, targets, lambda target, tree=tree: target.tree_rows(tree))
        for target in itertools.chain(*targets):
            target.commit(first_path(tree))
    assert any(isinstance(layer, WaitingRows) and layer.length > 40 for layer in targets[1][0].cache.layers)
    for count in (50, 20):
        for of_model in targets:
            of_model[0].cache.truncate(count)
            of_model[1].cache = of_model[0].cache.copy(count)
        read_both(models, targets, lambda target: next_rows(target.cache, torch.tensor([3, 4, 5])))
        for target in itertools.chain(*targets):
            target.cache.truncate()
    if not targets[0][0].cache.has_states:
        tensors = targets[1][0].cache.tensors()
        for of_model, causal in zip(targets, models, strict=True):
            of_model[1].cache = causal.new_text()
            of_model[1].cache.fill(tensors.get, list(targets[1][0].cache.ids))
        read_both(models, targets, lambda target: next_rows(target.cache, torch.tensor([6])))


def first_path(tree: TokenTree) -> tuple[int, ...]:
    """The path to the last node, without the root."""
    path = [tree.num_nodes - 1]
    while tree.parents[path[0]] > 0:
        path.insert(0, int(tree.parents[path[0]]))
    return tuple(path)


@pytest.mark.parametrize("kind", ["gemma2", "llama4"])
def test_rows_before_a_window_stay_in_ram(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(KINDS[kind]())
    windows = waiting_windows(model)
    assert windows
    causal = CausalModel(model, device=torch.device("cpu"), chunk_rows=16)
    layers = range(int(causal.config.num_hidden_layers))
    causal.waiting = KeyStream(SimulatedDevice(is_eager=True), layers, row_bytes=4096, windows=windows)
    target, num_brought = Target(causal), dict.fromkeys(layers, 0)
    target.prefill(torch.arange(60))
    parts = WaitingRows.parts

    def brought(self: WaitingRows) -> Iterator[tuple[int, Tensor]]:
        layer = next(index for index, one in enumerate(target.cache.layers) if one is self)
        for at, rows in parts(self):
            num_brought[layer] += rows.numel()
            yield at, rows

    monkeypatch.setattr(WaitingRows, "parts", brought)
    causal.read([next_rows(target.cache, torch.arange(5))])
    for layer, num_bytes in num_brought.items():
        row_bytes = sum(part.numel() // 60 * part.itemsize for part in target.cache.layers[layer].rows(60))
        first = windows[layer].first_seen(60) if layer in windows else 0
        assert num_bytes == (60 - first) * row_bytes
        assert (first > 40) == (layer in windows)
