"""Passes of few rows on a processor: all layers are one call of a text that is compiled for the decoder's shape."""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from edgespec.model.length_rotation import LengthRotation
from edgespec.model.mechanisms.windows import AttentionWindow, key_sources
from edgespec.model.native.layers import NativeDecoder, native_decoder
from edgespec.model.native.records import LAYER, PASS, SPAN
from edgespec.model.native.shape import DecoderShape
from edgespec.model.native.states import NativeStates
from edgespec.model.native.workspace import (
    MOST_ROWS,
    MOST_TOGETHER,
    QUERY_GROWTH,
    num_rotated,
    scratch_bytes,
    with_room,
    workspace_sizes,
)
from edgespec.model.pass_rows import PassRows, Runs, by_length
from offload.native import threads
from offload.native.code import LANES
from offload.native.compiler import Compiled, compiled

NO_STORAGE = (0, 0, 0)
UNROTATED = ""  # of a layer whose queries and keys have no positions


class NativePasses:
    """The passes of a model whose layers stay in memory."""

    def __init__(
        self, model: PreTrainedModel, decoder: nn.Module, known: NativeDecoder, windows: Sequence[AttentionWindow],
        rotations: _Rotations,
    ) -> None:  # fmt: skip
        self._embedding = model.get_input_embeddings()
        # Of a head; a block's rows of features are no rows that layers transform
        self._fuse: Callable[[Tensor, Tensor], Tensor] | None = (
            None if hasattr(model, "block") else getattr(model, "fuse", None)
        )
        self._known, self._windows = known, windows
        self._decoder, self._reading = decoder, reading_of(decoder)
        self._rotations = rotations
        self._code = _compiled(known.shapes)
        self._run = self._code.address("run")
        self._alone = {
            "thread_number": self._code.address("first_thread"),
            "num_threads": self._code.address("one_thread"),
        }
        shapes = known.shapes
        self._keyed = [number for number, layer in enumerate(known.layers) if shapes[layer.kind].delta is None]
        self._barrier = torch.zeros(0, dtype=torch.int64)
        keys = next((shape for shape in known.shapes if shape.delta is None), known.shapes[0])
        self._no_rows = torch.empty(1, keys.key_heads, 0, keys.head_dim, dtype=model.dtype)
        self._states = NativeStates.of(known, dtype=model.dtype)
        self._memory: dict[str, Tensor] = {}
        self._tables: list[Tensor] = []
        self._layers: Any = None
        self._num_positions = 0

    def runs(self, part: PassRows, most_rows: int) -> Runs:
        """Return a text's rows: few, or a tree's, which are read here, and between them what is read as prompts are.

        That depends on no other text, and on no part of `most_rows` or several times so many in which a prompt is read.
        """
        is_known = part.seen is None and not part.cache.adapters
        is_known &= part.previous is None or self._fuse is not None
        if not is_known or reading_of(self._decoder) != self._reading:  # a draft may be tried in other ways
            return None, part, None
        return by_length(part, most_rows, MOST_ROWS) if part.visible is None else (None, None, part)

    @torch.no_grad()
    def read(
        self, parts: Sequence[PassRows], aux_layers: Collection[int] = ()
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Append rows to their texts, and return their last hidden states [n, h].

        Beside them is the residual stream of all rows [n, h] before these layers, and behind the last one.
        """
        pieces = [_pieces(part) for part in parts]
        calls = list(_in_calls(itertools.chain(*pieces)))
        count = sum(part.count for part in parts)
        shape = self._known.shapes[0]
        aux = {layer: torch.empty(count, shape.hidden, dtype=self._no_rows.dtype) for layer in aux_layers}
        found, first = list[Tensor](), 0
        for some in calls:
            end = first + sum(part.count for part in some)
            found += self._read(some, {layer: rows[first:end] for layer, rows in aux.items()})
            first = end
        in_turn = iter(found)
        of_parts = [list(itertools.islice(in_turn, len(own))) for own in pieces]
        return [own[0] if len(own) == 1 else torch.cat(own) for own in of_parts], aux

    def _read(self, parts: Sequence[PassRows], aux: Mapping[int, Tensor]) -> list[Tensor]:
        counts = [part.count for part in parts]
        ends = [part.cache.length + part.count for part in parts]
        given = self._given(parts).contiguous()
        found = given.new_empty(len(given), self._known.shapes[0].hidden)
        self._rotate(max(ends))
        positions = [self._rotations.places(part, self._num_positions).contiguous() for part in parts]
        visible = [None if part.visible is None else part.visible.contiguous() for part in parts]
        firsts = itertools.accumulate(counts, initial=0)
        spans = SPAN.filled([
            {
                "first": first,
                "count": part.count,
                "length": part.cache.length,
                "tail": 0 if seen is None else seen.shape[1],
                "visible": 0 if seen is None else seen.data_ptr(),
                "positions": places.data_ptr(),
            }
            for first, part, seen, places in zip(firsts, parts, visible, positions, strict=False)
        ])  # fmt: skip
        storages = self._storages(parts, ends)
        states = None if self._states is None else self._states.begin(parts)
        num_threads = threads.most_threads()
        max_path = max((seen.shape[1] for seen in visible if seen is not None), default=1)
        num_layers = len(self._known.layers)
        kept = (aux[layer].data_ptr() if layer in aux else 0 for layer in range(num_layers + 1))
        to_aux = (ctypes.c_int64 * (num_layers + 1))(*kept)
        record = PASS.filled([{
            **self._thread_facts(num_threads),
            "num_layers": num_layers,
            "aux": ctypes.addressof(to_aux),
            "layers": ctypes.addressof(self._layers),
            "num_texts": len(parts),
            "spans": ctypes.addressof(spans),
            "storages": ctypes.addressof(storages),
            "states": 0 if states is None else ctypes.addressof(states.records),
            "num_rows": sum(counts),
            "max_path": max_path,
            "given": given.data_ptr(),
            "found": found.data_ptr(),
            "last_norm": 0 if self._known.last_norm is None else self._known.last_norm.data_ptr(),
            **self._workspace(sum(counts), max(ends), max_path, num_threads),
        }])  # fmt: skip
        threads.run(self._run, ctypes.addressof(record), num_threads)
        for part, end in zip(parts, ends, strict=True):
            for number in self._keyed:
                part.cache.layers[number].length = end
        if states is not None:
            states.append()
        return list(found.split(counts))

    def _given(self, parts: Sequence[PassRows]) -> Tensor:
        """Return what the first layer takes: embeddings, or what a head makes of them and of features."""
        embedded: Tensor = self._embedding(torch.cat([part.ids for part in parts]))
        previous = [part.previous for part in parts if part.previous is not None]
        return embedded if self._fuse is None else self._fuse(embedded, torch.cat(previous))

    def _thread_facts(self, num_threads: int) -> dict[str, int]:
        if num_threads == 1:
            return self._alone
        if len(self._barrier) != 16 + num_threads:  # both of its numbers have a line of the cache of their own
            self._barrier = torch.zeros(16 + num_threads, dtype=torch.int64)  # then each thread's processor
        return {**_of_openmp(), "barrier": self._barrier.data_ptr()}

    def _storages(self, parts: Sequence[PassRows], ends: Sequence[int]) -> Any:
        """Return where each layer keeps each text's keys and values, and the capacity: [layers, texts, 3].

        A layer without keys has none.
        """
        for part, end in zip(parts, ends, strict=True):
            for number in self._keyed:
                layer = part.cache.layers[number]
                if not layer.capacity:
                    layer.append(self._no_rows, self._no_rows)
                layer.reserve(end)
        found = [
            number for layers in zip(*(part.cache.layers for part in parts), strict=True) for layer in layers
            for number in (layer.addresses if layer.capacity else NO_STORAGE)
        ]  # fmt: skip
        return (ctypes.c_int64 * len(found))(*found)

    def _rotate(self, num_positions: int) -> None:
        """Make the records of layers, with rotations of so many positions at least."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = num_rotated(num_positions)
        self._tables = self._rotations.of_layers(self._num_positions)
        self._layers = LAYER.filled([
            {
                "kind": layer.kind,
                "window": window.size or 0,
                "first_seen": window.first,
                "rotation": table.data_ptr(),
                **{field: part.data_ptr() for field, part in layer.parts.items()},
                **{f"{name}_function": weight.function for name, weight in layer.weights.items()},
                **{f"{name}_weight": ctypes.addressof(weight.record) for name, weight in layer.weights.items()},
                **{f"{name}_bias": bias.data_ptr() for name, bias in layer.biases.items()},
            }
            for layer, window, table in zip(self._known.layers, self._windows, self._tables, strict=True)
        ])  # fmt: skip

    def _workspace(self, num_rows: int, num_keys: int, max_path: int, num_threads: int) -> dict[str, int]:
        """Return the addresses of the memory that a pass needs besides."""
        shapes = self._known.shapes
        sizes = workspace_sizes(shapes, num_rows, num_keys, max_path, num_threads)
        for name, size in sizes.items():
            if name not in self._memory or self._memory[name].nbytes < size:
                self._memory[name] = torch.empty(with_room(size), dtype=torch.uint8)
        addresses = {name: memory.data_ptr() for name, memory in self._memory.items()}
        return addresses | {"scratch_bytes": scratch_bytes(shapes, num_keys)}

    @property
    def held_bytes(self) -> int:
        """What passes hold between them: their workspace, and rotations."""
        return sum(memory.nbytes for memory in (*self._memory.values(), *{id(t): t for t in self._tables}.values()))


def _pieces(part: PassRows) -> list[PassRows]:
    """Return the rows of a large tree in several calls; a node stands behind its ancestors."""
    if part.visible is None or part.count <= MOST_TOGETHER:
        return [part]
    before, found = part.visible.shape[1] - part.count, []
    for start in range(0, part.count, MOST_TOGETHER):
        end = min(start + MOST_TOGETHER, part.count)
        found.append(
            PassRows(
                cache=part.cache,
                ids=part.ids[start:end],
                positions=part.positions[: before + end],
                visible=part.visible[start:end, : before + end],
                previous=None if part.previous is None else part.previous[start:end],
            )
        )
    return found


def _in_calls(parts: Iterable[PassRows]) -> Iterator[list[PassRows]]:
    """Yield the texts whose rows one call takes."""
    some: list[PassRows] = []
    for part in parts:
        if some and sum(one.count for one in some) + part.count > MOST_TOGETHER:
            yield some
            some = []
        some.append(part)
    yield some


class _Rotations:
    """The cosines and sines of positions, as the decoder's own module makes them for each kind of layer."""

    def __init__(
        self, decoder: Any, layers: Sequence[nn.Module], by_length: LengthRotation, *, dtype: torch.dtype
    ) -> None:  # fmt: skip
        self._module, self._by_length, self._dtype = decoder.rotary_emb, by_length, dtype
        takes_kind = "layer_type" in inspect.signature(self._module.forward).parameters
        kinds = decoder.config.layer_types if takes_kind else [None] * len(layers)
        mixers = [getattr(layer, "self_attn", None) for layer in layers]
        self._kinds = [
            kind if getattr(mixer, "use_rope", True) else UNROTATED for kind, mixer in zip(kinds, mixers, strict=True)
        ]
        rope: dict[str, Any] = getattr(decoder.config, "rope_parameters", None) or {}
        self._growth: float | None = rope.get(QUERY_GROWTH)
        self._length = int(rope.get("original_max_position_embeddings") or 1)  # behind which queries grow

    def of_layers(self, count: int) -> list[Tensor]:
        """Return the rotations of so many positions for each layer: float32 [positions, rotated columns].

        Where texts of two lengths rotate otherwise, there are so many of each. Factors of queries stand behind.
        """
        made = {kind: self._table(kind, count) for kind in set(self._kinds)}
        return [made[kind] for kind in self._kinds]

    def places(self, part: PassRows, count: int) -> Tensor:
        """Return where rows' rotations are among those of so many positions [n]."""
        if self._by_length.two_lengths is None:
            return part.row_positions
        return part.row_positions + count * self._by_length.are_long(part)

    @property
    def factor_columns(self) -> int:
        """The columns behind a position's rotation, which all are a factor of its queries."""
        return 0 if self._growth is None else LANES

    def _table(self, kind: str | None, count: int) -> Tensor:
        lengths = self._by_length.two_lengths
        if lengths is None:
            return self._of_positions(kind, count)
        tables = []
        for length, num_rows in zip(lengths, (min(count, lengths[0]), count), strict=True):
            with self._by_length.of_length(length, num_rows):
                tables.append(pad(self._of_positions(kind, num_rows), (0, 0, 0, count - num_rows)))
        return torch.cat(tables)

    @torch.no_grad()
    def _of_positions(self, kind: str | None, count: int) -> Tensor:
        positions, like = torch.arange(count)[None], torch.empty(1, 1, 1)
        cosine, sine = self._module(like, positions, *([] if kind in {None, UNROTATED} else [kind]))
        if kind == UNROTATED:
            cosine, sine = torch.ones_like(cosine), torch.zeros_like(sine)
        half = cosine.shape[-1] // 2
        if not torch.equal(cosine[..., :half], cosine[..., half:]):  # they are not repeated for the second halves
            half = cosine.shape[-1]
        parts = [cosine[0, :, :half], sine[0, :, :half]]
        if self._growth is not None:
            factors = 1 + self._growth * torch.log1p(positions[0] // self._length)
            parts.append(factors.to(self._dtype).float()[:, None].expand(-1, LANES))
        return torch.cat(parts, -1).contiguous()


def reading_of(decoder: Any) -> tuple[object, ...]:
    """Return what of a draft's layers changes as it is tried in other ways than its folder states."""
    first = decoder.layers[0] if hasattr(decoder, "layers") else None
    flags = (getattr(first, name, None) for name in ("norm_before_residual", "has_feature_first"))
    return (getattr(decoder, "norm", None), *flags)


def native_passes(
    model: PreTrainedModel, decoder: nn.Module, layers: Sequence[nn.Module], windows: Sequence[AttentionWindow],
    by_length: LengthRotation,
) -> NativePasses | None:  # fmt: skip
    """Return the passes of a model; None where it is made of other parts, or its weights lie in another way."""
    config = model.config.get_text_config(decoder=True)
    states_kinds = bool(getattr(config, "layer_types", None))
    if not states_kinds and not any(window.size for window in windows):  # the calls alone state that of all layers
        windows = [replace(window, size=getattr(config, "sliding_window", None)) for window in windows]
    is_usual = not any(window.in_chunks or window.is_causal for window in windows)
    if not is_usual or key_sources(config) != list(range(len(layers))) or not hasattr(decoder, "rotary_emb"):
        return None
    rotations = _Rotations(decoder, layers, by_length, dtype=model.dtype)
    rotated = rotations.of_layers(2)[0].shape[-1] - rotations.factor_columns
    known = native_decoder(
        decoder, layers, config, dtype=model.dtype, rotated=rotated, factor_columns=rotations.factor_columns
    )
    return None if known is None else NativePasses(model, decoder, known, windows, rotations)


@functools.lru_cache(8)
def _compiled(shapes: tuple[DecoderShape, ...]) -> Compiled:
    from edgespec.model.native.pass_text import pass_module

    return compiled(str(pass_module(shapes)))


@functools.cache
def _of_openmp() -> dict[str, int]:
    """Return the addresses of what a thread asks, and of what lets others run."""
    system = ctypes.CDLL(None)
    give_way, processor = (
        ctypes.cast(asked, ctypes.c_void_p).value for asked in (system.sched_yield, system.sched_getcpu)
    )
    facts = {
        "thread_number": threads.address_of("omp_get_thread_num"),
        "num_threads": threads.address_of("omp_get_num_threads"),
        "give_way": give_way,
        "processor": processor,
    }
    return {name: address or 0 for name, address in facts.items()}
