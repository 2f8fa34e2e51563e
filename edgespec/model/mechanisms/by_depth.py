"""Recurrent mixers whose functions we do not know, by their own code: level by level through a tree.

Such a mixer reads rows and a cache, and keeps all of its state there. It gets a small cache of its own: the nodes of
one depth are a batch for it, each with the state of its parent. The text keeps a state and the inputs of the rows
after it; when those become text, the mixer reads them once more. Legend: m rows, r rows after the state, b nodes of one
depth, n rows of each, h a row's inputs, s numbers of a state; of Mamba 1's scan, c channels, k numbers of a channel.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, LinearAttentionLayer

from edgespec.model.layer_kinds import kinds_of
from edgespec.model.mechanisms.mechanism import (
    Mechanism,
    ModelParts,
    Uninstall,
    family_classes,
    family_modules,
    family_names,
    wrap_forwards,
)
from edgespec.model.mechanisms.recurrent import (
    KEYLESS,
    KINDS,
    NUM_ROW_COPIES,
    RecurrentFunction,
    read_rows,
    silence_missing_kernels,
)
from edgespec.model.mechanisms.state_cache import FOLLOWING_ROWS, Fold, Rows, StateRows, StateSizes
from edgespec.model.pass_cache import attended, cache_argument, in_passes, mixer_under_way
from edgespec.model.pass_rows import Span
from edgespec.to_device import on_device

Result = TypeVar("Result")

STATES = ("conv_states", "recurrent_states")  # that transformers' cache keeps of a layer
SCAN, STEP = "mamba_selective_scan", "mamba_selective_state_update"  # Mamba 1's
# Functions of mixers that go on from a state with many rows at once: Kimi's, Zaya's, Mamba 1's by `continued`
CONTINUING = {"chunk_kimi_delta_attention", "conv_qk_grouped", SCAN}
OTHER_SCANS = {SCAN, "chunk_kimi_delta_attention"}  # that rule out our own functions
STATE_CALLS = {"update_conv_state", "update_recurrent_state"}  # of a cache
FLOAT32_BYTES = 4
NUM_LEVEL_COPIES = 5  # of states while the rows of one depth, or those of a text, pass a mixer by its own code

_scan_state: ContextVar[Tensor | None] = ContextVar("scan_state", default=None)


class ByDepth(Mechanism):
    """Mixers of which we know where their states are, not how they change."""

    kinds = KINDS
    keyless_kinds = KEYLESS
    keeps_states = is_unflagged = has_other_bits = True

    def __init__(self, known: Sequence[RecurrentFunction]) -> None:
        """`known` are the functions that are read otherwise: a convolution, and memories behind it."""
        self._known = known

    def is_read(self, config: PretrainedConfig) -> bool:
        """Return whether mixers keep all of their states in transformers' cache, and have unknown functions."""
        if not self.has_layers(config) or self._has_known_functions(config):
            return False
        return any(keeps_state(kind) for kind in family_classes(config))

    def reason(self, config: PretrainedConfig) -> str | None:
        """Return what states cannot be followed."""
        what = None
        if self.has_layers(config):
            if getattr(config, "num_mem_blocks", None):  # Zamba's: their caches are the layers' own all the same
                what = "layers that share one block of attention, which"
            elif not (self._has_known_functions(config) or self.is_read(config)):
                what = "recurrent layers of a kind of its own, which"
        else:
            heads = [getattr(of, "num_attention_heads", None) for of in config.per_layer_config]
            if heads and not any(heads):
                what = "recurrent layers of a kind of its own, whose state"
        return what and f"has {what} cannot be followed through a token tree"

    def replaces(self, other: Mechanism) -> bool:
        """Return whether what it reads is not read by another."""
        return other in self._known

    def install(self, parts: ModelParts) -> Uninstall:
        """Let the mixers of these layers be read level by level."""
        mixers = [module for module in parts.layers.modules() if keeps_state(type(module))]
        for module in mixers:
            for names in family_modules(type(module)):
                if SCAN in names and not hasattr(names[SCAN], "is_edgespecs"):
                    names[SCAN] = _continuing(names[SCAN], names[STEP])
        numbers = {module: number for number, module in enumerate(mixers)}

        def wrapped(module: nn.Module) -> Callable[..., Any]:
            mixer = Mixer(module)
            return in_passes(mixer.forward, functools.partial(_forward, mixer, numbers[module]))

        return wrap_forwards(mixers, wrapped)

    def sizes(self, mixer: nn.Module, dtype: torch.dtype, *, num_inputs: int, keeps_row_bits: bool) -> StateSizes:
        """Return those of a mixer: it reads rows without numbers, on the meta device."""
        if not keeps_state(type(mixer)):
            return StateSizes()
        bare = copy.deepcopy(mixer).to("meta", torch.float32)
        state_bytes = Mixer(bare).num_state_numbers(num_inputs) * FLOAT32_BYTES
        row_bytes = num_inputs * dtype.itemsize
        return StateSizes(
            state_bytes=state_bytes,
            row_bytes=row_bytes,
            work_bytes=NUM_ROW_COPIES * row_bytes,
            level_bytes=NUM_LEVEL_COPIES * state_bytes,
        )

    def layer_facts(self, config: PretrainedConfig, layer: int) -> object:
        """Return whether a layer is not the first one of Zamba's, which share their weights."""
        kinds = kinds_of(config)
        return kinds[layer] == "hybrid" and "hybrid" in kinds[:layer]

    def narrow(self, config: PretrainedConfig, hidden_size: int) -> dict[str, Any]:
        """Return which of the layers are Zamba's."""
        if "hybrid_layer_ids" not in vars(config):
            return {}
        return {"hybrid_layer_ids": [layer for layer, kind in enumerate(kinds_of(config)) if kind == "hybrid"]}

    def _has_known_functions(self, config: PretrainedConfig) -> bool:
        names = family_names(config)
        convolution, *memories = (function.function in names for function in self._known)
        needs_memory = "conv" not in kinds_of(config)
        return convolution and OTHER_SCANS.isdisjoint(names) and (any(memories) or not needs_memory)


def keeps_state(kind: type) -> bool:
    """Return whether modules of this class keep a state in transformers' cache, and no keys and values beside it."""
    forward = inspect.unwrap(getattr(kind, "forward", None) or (lambda: None))
    calls = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    return not STATE_CALLS.isdisjoint(calls) and "update" not in calls


def _forward(mixer: Mixer, number: int, spans: Sequence[Span], *arguments: Any, **named: Any) -> Any:
    inputs: Tensor = arguments[0] if arguments else named["hidden_states"]  # [1, n, h]
    mixer_under_way.set((mixer.layer, number))
    parts = inputs[0].split([span.count for span in spans])
    return mixer.as_found(read_rows(spans, [Levels(mixer=mixer, inputs=part) for part in parts]))


def continued(state: Tensor | None, call: Callable[[], Result]) -> Result:
    """Return the result of a call in which Mamba 1's scans go on from a state [b, c, k]; with None, from zeros."""
    context = copy_context()
    context.run(_scan_state.set, state)
    return context.run(call)


def _continuing(plain: Callable[..., Any], step: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return Mamba 1's scan of rows [b, c, n] that go on from the state of `continued`, which `plain` ignores.

    Each row is a single `step` of transformers' own.
    """

    @functools.wraps(plain)
    def scan(inputs: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **named: Any) -> Any:  # noqa: N803
        before = _scan_state.get()
        if before is None:
            return plain(inputs, dt, A, B, C, **named)
        state, gate = before.clone(), named.get("z")
        rows = [
            step(
                *(state, inputs[..., row], dt[..., row], A, B[..., row], C[..., row]),
                D=named.get("D"),
                z=None if gate is None else gate[..., row],
                dt_bias=named.get("delta_bias"),
                dt_softplus=named.get("delta_softplus", False),
            )
            for row in range(inputs.shape[2])
        ]
        found = torch.stack(rows, 2)
        return (found, state) if named.get("return_last_state") else found

    scan.is_edgespecs = True  # type: ignore[attr-defined]
    return scan


class Mixer:
    """A mixer that reads rows from states to states, which are flat, in float32: it holds shorter numbers exactly."""

    def __init__(self, module: nn.Module) -> None:
        silence_missing_kernels()
        self.layer: int = module.layer_idx  # type: ignore[assignment]
        self.forward = module.forward
        self._cache_argument = cache_argument(self.forward)
        self._continues = not CONTINUING.isdisjoint(inspect.unwrap(type(module).forward).__code__.co_names)
        self._parts: list[tuple[str, int, torch.Size, torch.dtype]] = []  # of a state
        self._shapes: list[torch.Size] | None = None  # of a row's outputs, where there are several

    def step(self, inputs: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of rows [b, n, h] that follow states [b, s], and the states after them.

        Before a text there is no state: s is 0.
        """
        held = LinearAttentionLayer()
        if states.shape[1]:
            if not self._parts:  # these states are of another process, as a file has them
                self.step(inputs[:1, :1], states.new_empty(1, 0))
            self._restore(held, states)
        cache = Cache(layers=[held] * (self.layer + 1))
        forward = functools.partial(self.forward, hidden_states=inputs, **{self._cache_argument: cache})
        # Its functions must be transformers' own.
        found = attended(None, functools.partial(continued, held.recurrent_states[0], forward))
        if isinstance(found, tuple):
            self._shapes = [part.shape[2:] for part in found]
            found = torch.cat([part.flatten(2) for part in found], 2)
        parts = [(kind, number, part) for kind in STATES for number, part in getattr(held, kind).items()]
        kept = [(kind, number, part) for kind, number, part in parts if part is not None]
        self._parts = [(kind, number, part.shape[1:], part.dtype) for kind, number, part in kept]
        return found, torch.cat([part.flatten(1).float() for _, _, part in kept], 1)

    def num_state_numbers(self, num_inputs: int) -> int:
        """Return the size of a state, s, for rows of h inputs; this mixer is on the meta device."""
        return self.step(torch.empty(1, 2, num_inputs, device="meta"), torch.empty(1, 0, device="meta"))[1].shape[1]

    def follow(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of rows [m, h], each the child of the one before, and the state [s] after them."""
        found, states = [], state[None]
        for rows in inputs.split(FOLLOWING_ROWS if self._continues else 1):
            out, states = self.step(rows[None], states)
            found.append(out[0])
        return torch.cat(found), states[0]

    def fold(self, state: Tensor, rows: Rows, count: int) -> tuple[Tensor, Rows]:
        """Read the first `count` rows, and return the state after them and the remaining rows."""
        return self.follow(rows[0][:count], state)[1], (rows[0][count:],)

    def as_found(self, outputs: Tensor) -> Any:
        """Return outputs [1, n, ...] as the tensors that the mixer itself returns."""
        if self._shapes is None:
            return outputs
        parts = outputs.split([shape.numel() for shape in self._shapes], 2)
        return tuple(part.unflatten(2, shape) for part, shape in zip(parts, self._shapes, strict=True))

    def _restore(self, held: LinearAttentionLayer, states: Tensor) -> None:
        """Put a copy of these states into a layer's cache: mixers write to it."""
        sizes = [shape.numel() for _, _, shape, _ in self._parts]
        for (kind, number, shape, dtype), part in zip(self._parts, states.split(sizes, 1), strict=True):
            whole = part.unflatten(1, shape).to(dtype, copy=True)
            getattr(held, kind)[number] = whole
            getattr(held, f"is_{kind}_initialized")[number] = True
            held.has_previous_state[number] = True
            held.device, held.dtype = whole.device, whole.dtype
            if kind == "conv_states":
                held.conv_kernel_size[number] = shape[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A mixer at rows of one text. Its state is all that the mixer keeps, and its rows are the mixer's inputs."""

    mixer: Mixer
    inputs: Tensor  # [m, h]
    rows_at_once = 1  # open rows are read again

    @property
    def fold(self) -> Fold:
        """The function that takes rows into a state; it holds no row, so that a text does not keep these."""
        return self.mixer.fold

    def initial(self) -> Tensor:
        """Return no numbers: the mixer begins by itself."""
        return self.inputs.new_empty(0, dtype=torch.float32)

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Let the mixer read on."""
        return self.mixer.follow(self.inputs[:count], state)

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Read the rows of each depth from the states of their parents, beginning with open ancestors."""
        new = self.inputs[first:]
        inputs = torch.cat([*held.rows, new])
        levels = _levels(visible)
        stem = list(itertools.takewhile(lambda level: len(level[0]) == 1, levels))  # before the first siblings
        found, states = [], held.state[None]
        if stem:
            out, state = self.mixer.follow(inputs[torch.cat([rows for rows, _ in stem])], held.state)
            found, states = [out], state[None]
        for rows, parents in levels[len(stem) :]:
            out, states = self.mixer.step(inputs[rows, None], states[parents])
            found.append(out[:, 0])
        read = torch.cat(found)
        outputs = read.new_zeros(len(inputs), *read.shape[1:])
        outputs[torch.cat([rows for rows, _ in levels])] = read
        return outputs[held.num_open :], (new,)


def _levels(visible: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the rows of each depth, and the places of their parents among those of the depth before.

    `visible` [m, r + m] says which rows each new one sees: a path, whose rows lie in the order of their depth. Rows
    that none of them sees are left out.
    """
    order = torch.arange(1, visible.shape[1] + 1, device=visible.device)
    nearest = torch.nn.functional.pad((visible * order).cummax(1).values[:, :-1], (1, 0))
    depths = (visible * visible.cumsum(1)).amax(0).tolist()  # from 1 on; 0 where it is not seen
    parents = (visible * nearest).amax(0).tolist()  # from 1 on; 0 for the state
    levels: list[list[int]] = [[] for _ in range(max(depths))]
    for row, depth in enumerate(depths):
        if depth:
            levels[depth - 1].append(row)
    place = {0: 0} | {row + 1: at for rows in levels for at, row in enumerate(rows)}
    return [
        (on_device(rows, visible.device), on_device([place[parents[row]] for row in rows], visible.device))
        for rows in levels
    ]
