"""Modules of a loaded model add what adapters have for the rows that pass them: y = base(x) + (x A) B s.

As in PEFT's unmerged forward, both products and the sum are made in float32, whatever the model computes in, and the
sum is rounded once, at its end. Rows of texts with other adapters, or none, may pass together: the base multiplies all
of them at once, and each adapter the rows of its texts alone.

Legend: n rows, i and o a module's columns and rows, r an adapter's rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.pytorch_utils import Conv1D

from offload.adapters.adapter import Delta, read_tensor
from offload.adapters.fit import FLOAT32_BYTES, FittedAdapter
from offload.adapters.use import AdapterUse, Run, refused, rows_under_way
from offload.formats.storage import rows_at_once
from offload.layouts.onednn import multiply
from offload.native.compiler import is_available
from offload.packed_weight import PART_BYTES, PackedWeight, unpacked_rows

if TYPE_CHECKING:
    from offload.native.low_rank import LowRankWeight

EYE_ROWS = 256  # of a product that finds a layer's own weight
TABLE_ROWS = 4096  # of a table whose columns' lengths are found


@dataclass(slots=True, kw_only=True, eq=False)
class _Factors:
    """What one adapter adds to a module, on the module's device in float32."""

    down: Tensor  # [r, i]; of an embedding the other way round, [vocab, r]
    up: Tensor  # [o, r]
    scale: float
    up_bias: Tensor | None  # [o]
    magnitude: Tensor | None  # [o]
    native: LowRankWeight | None = None  # which has all of them, where it can be: `up` is empty then

    @classmethod
    def of(cls, delta: Delta, device: torch.device) -> _Factors:
        down, up, up_bias, magnitude = (
            None if one is None else read_tensor(one).to(device, torch.float32)
            for one in (delta.down, delta.up, delta.up_bias, delta.magnitude)
        )
        assert down is not None
        assert up is not None
        down = down.T.contiguous() if delta.is_embedding else down
        native = None
        if magnitude is None and not delta.is_embedding and device.type == "cpu" and is_available():
            from offload.native.low_rank import LowRankWeight  # needs llvmlite

            native = LowRankWeight.of(down, up, up_bias)
        return cls(
            down=down,
            up=up if native is None else up.new_empty(0),
            scale=delta.scale,
            up_bias=up_bias,
            magnitude=magnitude,
            native=native,
        )

    def added(self, rows: Tensor) -> Tensor:
        """Return what rows [..., i] of float32 give by both products, without the scale: [..., o]."""
        if self.native is None:
            return multiply(multiply(rows, self.down), self.up, self.up_bias)
        flat = rows.reshape(-1, rows.shape[-1]).contiguous()
        found = torch.zeros(len(flat), len(self.native.bias))
        self.native.add(flat, found, 1.0)
        return found.view(*rows.shape[:-1], -1)

    @property
    def whole_up(self) -> Tensor:
        """The second matrix [o, r], however it lies."""
        return self.up if self.native is None else self.native.up.transpose(1, 2).reshape(-1, self.down.shape[0])


@dataclass(slots=True, kw_only=True, eq=False)
class _OwnPart:
    """What one adapter has of a module."""

    factors: _Factors | None = None
    replaced: dict[str, nn.Parameter] = field(default_factory=dict)  # parameters of its own, by attribute


_Parts = tuple[tuple[_OwnPart, float], ...]  # with what scales them


class LoadedAdapters:
    """The adapters of a model, in memory; several models may compute with them."""

    def __init__(self, adapters: Sequence[FittedAdapter], *, dtype: torch.dtype, device: torch.device) -> None:
        """Read all of them: factors in float32, parameters in the dtype that the model computes in."""
        self.by_module: dict[str, dict[str, _OwnPart]] = {}
        for adapter in adapters:
            for module, delta in adapter.deltas.items():
                self._part(module, adapter.name).factors = _Factors.of(delta, device)
            for parameter, entry in adapter.replaced.items():
                path, _, attribute = parameter.rpartition(".")
                whole = nn.Parameter(read_tensor(entry).to(device, dtype), requires_grad=False)
                self._part(path, adapter.name).replaced[attribute] = whole

    def _part(self, module: str, name: str) -> _OwnPart:
        return self.by_module.setdefault(module, {}).setdefault(name, _OwnPart())

    def attach(self, model: nn.Module, undo: ExitStack) -> None:
        """Let a model's modules add their parts to rows that are to have them, until `undo` is closed.

        It comes after all that changes how modules compute.
        """
        for path, of_adapters in self.by_module.items():
            _attach(model.get_submodule(path), path, of_adapters, undo)


def _attach(module: nn.Module, path: str, of_adapters: Mapping[str, _OwnPart], undo: ExitStack) -> None:
    own: Any = vars(module)
    former = own.get("forward")
    adapted = (_Embedding if isinstance(module, nn.Embedding) else _Rows)(module, path, of_adapters)
    if isinstance(adapted, _Embedding):
        undo.callback(module.register_forward_pre_hook(adapted.take_ids, prepend=True).remove)
    own["forward"], own["adapter_matrices"] = adapted.forward, adapted.matrices

    def restore() -> None:
        own.pop("forward", None)
        own.pop("adapter_matrices")
        if former is not None:
            own["forward"] = former

    undo.callback(restore)


def adapter_matrices(module: nn.Module) -> list[tuple[Tensor, Tensor, float]]:
    """Return A [r, i], B [o, r] and the scale of each adapter of the text whose rows pass now, in their order.

    That is for a weight that is read whole, and multiplied by who reads it: of rows of one text at a time.
    """
    of_module = vars(module).get("adapter_matrices")
    return [] if of_module is None else of_module()


class _Rows:
    """A module that makes a row of a row: a linear layer, or a norm."""

    def __init__(self, module: nn.Module, path: str, of_adapters: Mapping[str, _OwnPart]) -> None:
        self._module, self._path, self._of_adapters = module, path, of_adapters
        self._base: Callable[..., Tensor] = module.forward
        self._known_runs: tuple[Sequence[Run], Sequence[tuple[_Parts, int]]] = (), ()
        # Of DoRA, by scale and by the weight that stands for the module's: lengths of the rows of W + s B A [o]
        self._known_lengths: dict[tuple[_Factors, float, Tensor | None], Tensor] = {}

    def forward(self, given: Tensor) -> Tensor:
        """Return what the module makes of rows, each with the adapters of its text."""
        runs = self._runs()
        kinds = dict.fromkeys(parts for parts, _ in runs)
        if not any(kinds):
            return self._base(given)
        rows, num_rows = self._rows(given), sum(count for _, count in runs)
        if len(kinds) == 1 and _replaced(next(iter(kinds))):
            (parts,) = kinds
            return self._with_factors(rows, self._with_replaced(rows, parts), parts)
        found = self._base(given)
        own_memory = [parts for parts in kinds if parts and _is_native(parts)]
        if own_memory and rows.numel() == num_rows * rows.shape[-1]:
            found = _with_native(rows, found, runs)
            kinds = {parts: None for parts in kinds if parts not in own_memory}
        elif len(kinds) == 1:
            return self._with_factors(rows, found, next(iter(kinds)))
        for parts in filter(None, kinds):
            found = self._with_parts(rows, found, runs, parts)
        return found

    def matrices(self) -> list[tuple[Tensor, Tensor, float]]:
        """Return what `adapter_matrices` does."""
        kinds = dict.fromkeys(parts for parts, _ in self._runs())
        assert len(kinds) <= 1
        every = [(part.factors, factor) for parts in kinds for part, factor in parts]
        return [(one.down, one.whole_up, factor * one.scale) for one, factor in every if one is not None]

    def _runs(self) -> Sequence[tuple[_Parts, int]]:
        """Return the rows that pass now, with what they have of this module: the same rows pass many modules."""
        uses = rows_under_way.get()
        if uses is not self._known_runs[0]:
            of_uses = itertools.groupby(((self._parts(use), count) for use, count in uses), key=lambda run: run[0])
            self._known_runs = uses, [(parts, sum(count for _, count in same)) for parts, same in of_uses]
        return self._known_runs[1]

    def _with_parts(self, rows: Tensor, found: Tensor, runs: Sequence[tuple[_Parts, int]], parts: _Parts) -> Tensor:
        """Return the module's result, in which the rows that have these parts have theirs."""
        dim = self._row_dim(rows, sum(count for _, count in runs))
        if dim is None:
            what = (
                f"'{self._path}' gets other rows than one for each token, and texts with several adapters share them."
            )
            raise refused(what, "Let one text run at a time: `parallel=1`.")
        places = list(_places(runs, parts))
        own, base = (torch.cat([one.narrow(dim, *place) for place in places], dim) for one in (rows, found))
        base = self._with_replaced(own, parts) if _replaced(parts) else base
        adapted = self._with_factors(own, base, parts)
        for place, part in zip(places, adapted.split([count for _, count in places], dim), strict=True):
            found.narrow(dim, *place).copy_(part)
        return found

    def _parts(self, use: AdapterUse) -> _Parts:
        return tuple((self._of_adapters[name], factor) for name, factor in use if name in self._of_adapters)

    def _rows(self, given: Tensor) -> Tensor:
        """Return what adapters read of the module's argument."""
        return given

    def _row_dim(self, rows: Tensor, num_rows: int) -> int | None:
        return row_dim(rows, num_rows)

    def _with_replaced(self, rows: Tensor, parts: _Parts) -> Tensor:
        """Return what the module makes of rows with the parameters that stand for its own."""
        replaced = _replaced(parts)
        weight = replaced.get("weight")
        if weight is not None and type(self._module) is nn.Linear:
            return multiply(rows, weight, replaced.get("bias", self._module._parameters["bias"]))
        with _in_place(self._module, replaced):
            return self._base(rows)

    def _with_factors(self, rows: Tensor, base: Tensor, parts: _Parts) -> Tensor:
        """Return the base's result with what factors add, in the result's own dtype."""
        found, wide = base, rows.float()
        for part, factor in parts:
            factors = part.factors
            if factors is None:
                continue
            added = factors.added(wide) * (factor * factors.scale)
            if factors.magnitude is not None:  # rows of the weight have lengths of their own, and point as W + s B A
                replaced = _replaced(parts)
                bias = replaced.get("bias", self._module._parameters.get("bias"))
                share = self._share(base.dtype, factors, factor, replaced.get("weight"))
                added = (share - 1) * (base if bias is None else base - bias) + share * added
            found = found + added
        return found.to(base.dtype)

    def _share(self, dtype: torch.dtype, factors: _Factors, factor: float, weight: Tensor | None) -> Tensor:
        """Return what DoRA multiplies rows of W + s B A with [o]; `weight` is what stands for the module's own."""
        assert factors.magnitude is not None
        key = factors, factor, weight
        if key not in self._known_lengths:
            self._known_lengths[key] = self._lengths(dtype, factors, factor * factors.scale, weight)
        return factors.magnitude / self._known_lengths[key]

    def _lengths(self, dtype: torch.dtype, factors: _Factors, scale: float, weight: Tensor | None) -> Tensor:
        """Return the lengths [o] of the rows of W + s B A, of the numbers that packed weights mean."""
        shares = rows_of_weight(self._module, dtype, weight)
        if shares is None:
            return self._lengths_by_products(dtype, factors, scale)
        squares, first, turned = [], 0, factors.down.T.contiguous()  # [i, r]
        for own in shares:  # [some of o, i]
            ups = factors.up[first : first + len(own)]
            squares.append(multiply(ups, turned).mul_(scale).add_(own).square_().sum(1))
            first += len(own)
        return torch.cat(squares).sqrt()

    def _lengths_by_products(self, dtype: torch.dtype, factors: _Factors, scale: float) -> Tensor:
        """Return the same of a weight that is not there as such: the layer's own products with unit rows are it."""
        columns = factors.down.shape[1]
        squares = torch.zeros_like(factors.up[:, 0])
        bias = self._module._parameters.get("bias")
        for start in range(0, columns, EYE_ROWS):
            count = min(EYE_ROWS, columns - start)
            unit = torch.zeros(count, columns, dtype=dtype, device=squares.device)
            unit[:, start : start + count].fill_diagonal_(1)
            own = self._base(unit)  # [some of i, o]
            own = (own if bias is None else own - bias).float()
            own = own + scale * multiply(factors.down[:, start : start + count].T.contiguous(), factors.up)
            squares += own.square().sum(0)
        return squares.sqrt()


class _Embedding(_Rows):
    """A table, which gives rows of ids; what unpacks rows of it gives it other ids, so that these are noted before."""

    def take_ids(self, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Note the ids that the module was called with."""
        self._ids: Tensor = arguments[0]

    def _rows(self, given: Tensor) -> Tensor:
        return self._ids

    def _row_dim(self, rows: Tensor, num_rows: int) -> int | None:
        return row_dim(rows[..., None], num_rows)

    def _with_replaced(self, rows: Tensor, parts: _Parts) -> Tensor:
        with _in_place(self._module, _replaced(parts)):
            found: Tensor = type(self._module).forward(self._module, rows)
            return found

    def _with_factors(self, rows: Tensor, base: Tensor, parts: _Parts) -> Tensor:
        found = base
        scaled: Any = getattr(self._module, "embed_scale", None)  # which the base's own rows have already
        for part, factor in parts:
            if part.factors is None:
                continue
            few = embedding(rows, part.factors.down)  # [..., n, r]
            added = multiply(few, part.factors.up) * (factor * part.factors.scale)
            added = added * scaled.to(added.dtype) if isinstance(scaled, Tensor) else added
            found = found + added
            if part.factors.magnitude is not None:  # the sum so far has the shares of those before
                found = self._share(base.dtype, part.factors, factor, _replaced(parts).get("weight")) * found
        return found.to(base.dtype)

    def _lengths(self, dtype: torch.dtype, factors: _Factors, scale: float, weight: Tensor | None) -> Tensor:
        """Return the lengths [h] of the table's columns with what the adapter adds to its rows."""
        ids, context = self._ids, copy_context()
        context.run(rows_under_way.set, ())
        scaled: Any = getattr(self._module, "embed_scale", None)
        squares = torch.zeros_like(factors.up[:, 0])
        for few in torch.arange(len(factors.down), device=squares.device).split(TABLE_ROWS):
            if weight is None:  # by all that looks rows up, wherever they lie
                own = context.run(self._module, few).float()
                own = own / scaled.float() if isinstance(scaled, Tensor) else own
            else:
                own = weight[few].float()
            squares += (own + scale * multiply(factors.down[few], factors.up)).square().sum(0)
        self._ids = ids
        return squares.sqrt()


def _is_native(parts: _Parts) -> bool:
    """Return whether all that is added to a module is added to rows where they lie."""
    return all(part.factors is not None and part.factors.native is not None and not part.replaced for part, _ in parts)


def _with_native(rows: Tensor, base: Tensor, runs: Sequence[tuple[_Parts, int]]) -> Tensor:
    """Return the base's result [..., n, o] with what such parts add to rows [..., n, i]."""
    wide = rows.reshape(-1, rows.shape[-1]).float().contiguous()
    found = base.reshape(len(wide), -1).float().contiguous()
    first = 0
    for parts, count in runs:
        for part, factor in parts if _is_native(parts) else ():
            factors = part.factors
            assert factors is not None
            assert factors.native is not None
            own = slice(first, first + count)
            factors.native.add(wide[own], found[own], factor * factors.scale)
        first += count
    return found.view(base.shape).to(base.dtype)


def _places(runs: Sequence[tuple[_Parts, int]], parts: _Parts) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each run that has these parts."""
    first = 0
    for own, count in runs:
        if own == parts:
            yield first, count
        first += count


def _replaced(parts: _Parts) -> dict[str, nn.Parameter]:
    """Return the parameters that stand for a module's own: of several adapters the last one's, as in PEFT."""
    return {attribute: parameter for part, _ in parts for attribute, parameter in part.replaced.items()}


@contextmanager
def _in_place(module: nn.Module, replaced: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Within this block a module has these parameters in the place of its own."""
    own = {attribute: module._parameters[attribute] for attribute in replaced}
    module._parameters.update(replaced)
    try:
        yield
    finally:
        module._parameters.update(own)


def rows_of_weight(module: Any, dtype: torch.dtype, replaced: Tensor | None) -> Iterator[Tensor] | None:
    """Return rows of a layer's weight [o, i] that follow each other; None where the weight is not there as such.

    That is where it lies in a kernel's order, or packed on a card. `replaced` is what stands for it.
    """
    weight: Tensor = module._parameters["weight"] if replaced is None else replaced
    packed = module._modules.get("weight_packed")
    at_once = rows_at_once(PART_BYTES // FLOAT32_BYTES, weight.shape[0 if isinstance(module, Conv1D) else 1])
    if not weight.is_meta:
        parts: Sequence[Tensor] = (weight.T if isinstance(module, Conv1D) else weight).split(at_once)
        return iter(parts)
    if isinstance(packed, PackedWeight) and next(packed.parameters()).device.type == "cpu":
        return unpacked_rows(packed, dtype)
    rows_of = vars(module).get("weight_rows")  # of a packed head, also of one whose numbers a table has
    if rows_of is None:
        return None
    return (rows_of(slice(first, first + at_once)) for first in range(0, weight.shape[0], at_once))


def row_dim(rows: Tensor, num_rows: int) -> int | None:
    """Return the dimension of rows [..., n, ..., i] in which they have one for each token; None where none has.

    Heads stand behind rows, or before them in a view of such: [1, n, heads, d], [1, heads, n, d].
    """
    dims = [dim for dim in range(rows.dim() - 1) if rows.shape[dim] == num_rows]
    if len(dims) == 2 and rows.stride(dims[0]) < rows.stride(dims[1]):
        return dims[1]
    if dims == [0, 2] and rows.shape[1] == 1:  # several streams of as many rows
        return 2
    return dims[0] if dims else None
