"""Modules of a loaded model add what adapters have for the rows that pass them: y = base(x) + (x A) B s.

As in PEFT's unmerged forward, both products and the sum are made in float32, whatever the model computes in, and the
sum is rounded once, at its end. Rows of texts with other adapters, or none, may pass together: the base multiplies all
of them at once, and each adapter the rows of its texts alone.

Legend: n rows, i and o a module's columns and rows, r an adapter's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from offload.adapters.adapter import Delta, read_tensor
from offload.adapters.fit import FittedAdapter
from offload.adapters.use import AdapterUse, refused, rows_under_way
from offload.layouts.onednn import multiply

EYE_ROWS = 256  # of a product that finds a layer's own weight


@dataclass(slots=True, kw_only=True, eq=False)
class _Factors:
    """What one adapter adds to a module, on the module's device in float32."""

    down: Tensor  # [r, i]; of an embedding the other way round, [vocab, r]
    up: Tensor  # [o, r]
    scale: float
    up_bias: Tensor | None  # [o]
    magnitude: Tensor | None  # [o]

    @classmethod
    def of(cls, delta: Delta, device: torch.device) -> _Factors:
        down, up, up_bias, magnitude = (
            None if one is None else read_tensor(one).to(device, torch.float32)
            for one in (delta.down, delta.up, delta.up_bias, delta.magnitude)
        )
        assert down is not None
        assert up is not None
        down = down.T.contiguous() if delta.is_embedding else down
        return cls(down=down, up=up, scale=delta.scale, up_bias=up_bias, magnitude=magnitude)


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
    own["forward"] = adapted.forward

    def restore() -> None:
        own.pop("forward", None)
        if former is not None:
            own["forward"] = former

    undo.callback(restore)


class _Rows:
    """A module that makes a row of a row: a linear layer, or a norm."""

    def __init__(self, module: nn.Module, path: str, of_adapters: Mapping[str, _OwnPart]) -> None:
        self._module, self._path, self._of_adapters = module, path, of_adapters
        self._base: Callable[..., Tensor] = module.forward
        # Of DoRA, by scale: lengths of the rows of W + s B A [o]
        self._known_lengths: dict[tuple[_Factors, float], Tensor] = {}

    def forward(self, given: Tensor) -> Tensor:
        """Return what the module makes of rows, each with the adapters of its text."""
        runs = [(self._parts(use), count) for use, count in rows_under_way.get()]
        kinds = dict.fromkeys(parts for parts, _ in runs)
        if not any(kinds):
            return self._base(given)
        rows = self._rows(given)
        if len(kinds) == 1:
            (parts,) = kinds
            base = self._with_replaced(rows, parts) if _replaced(parts) else self._base(given)
            return self._with_factors(rows, base, parts)
        found = self._base(given)
        dim = self._row_dim(rows, sum(count for _, count in runs))
        if dim is None:
            what = (
                f"'{self._path}' gets other rows than one for each token, and texts with several adapters share them."
            )
            raise refused(what, "Let one text run at a time: `parallel=1`.")
        for parts in filter(None, kinds):
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
            scale = factor * factors.scale
            added = multiply(multiply(wide, factors.down), factors.up, factors.up_bias)
            found = found + (
                added * scale if factors.magnitude is None else self._of_magnitude(base, added, factors, scale)
            )
        return found.to(base.dtype)

    def _of_magnitude(self, base: Tensor, added: Tensor, factors: _Factors, scale: float) -> Tensor:
        """Return what DoRA adds: rows of the weight have lengths of their own, and W + s B A says where they point."""
        assert factors.magnitude is not None
        if (factors, scale) not in self._known_lengths:
            self._known_lengths[factors, scale] = self._lengths(base.dtype, factors, scale)
        bias = self._module._parameters.get("bias")
        share = factors.magnitude / self._known_lengths[factors, scale]
        own = base if bias is None else base - bias
        return (share - 1) * own + share * added * scale

    def _lengths(self, dtype: torch.dtype, factors: _Factors, scale: float) -> Tensor:
        """Return the lengths [o] of the rows of W + s B A: the layer's own products with unit rows are its weight."""
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
            found = found + (added * scaled.to(added.dtype) if isinstance(scaled, Tensor) else added)
        return found.to(base.dtype)


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
