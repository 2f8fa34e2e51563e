"""Weights of linear layers, as products that are written in LLVM's text take them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offload.native.compiler import Compiled, compiled, has_wide_registers

UNIT = 32  # rows, and columns, of which a weight has whole multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeight:
    """A weight [rows, columns], and the code that multiplies rounded rows with it."""

    code: Compiled  # whose `multiply` takes the record
    record: Any  # of addresses and sizes, as the code describes it
    keeps: Sequence[Any]  # what lives as long: the weight's parts
    rows: int
    columns: int
    takes_rounded: bool  # rows of 15 bits; else of float32
    in_halves: bool = False  # whether its rows are the first ones of all pairs, then the second ones

    @property
    def function(self) -> int:
        """The address of what multiplies."""
        return self.code.address("multiply")

    def product(self, rows: Tensor) -> Tensor:
        """Return rows [..., i], bf16 or float32, times the weight: [..., r]. The code has to know their dtype."""
        from offload.native.run import product

        return product(self.code, self.record, rows.reshape(-1, self.columns)).view(*rows.shape[:-1], self.rows)


def weight_of_parts(
    code: Compiled, parts: Sequence[Tensor], *, rows: int, columns: int, more: Sequence[int] = (), takes_rounded: bool
) -> NativeWeight:
    """Return a weight of two parts at most, which a compiled `multiply` takes."""
    addresses = [part.data_ptr() for part in parts]
    numbers = [*addresses, *[0] * (2 - len(addresses)), columns, rows, *more]
    return NativeWeight(
        code=code,
        record=(ctypes.c_int64 * len(numbers))(*numbers),
        keeps=parts,
        rows=rows,
        columns=columns,
        takes_rounded=takes_rounded,
    )


def native_weight(linear: nn.Module) -> NativeWeight | None:
    """Return a linear layer's weight for such a product; None where it lies in another way."""
    of_packed = vars(linear).get("native")
    if of_packed is not None:
        found: NativeWeight = of_packed()
        return found
    weight = linear._parameters.get("weight")
    return dense_weight(weight) if type(linear) is nn.Linear and weight is not None else None


def dense_weight(weight: Tensor) -> NativeWeight | None:
    """Return a weight [rows, columns] that is not packed; None where it lies in another way."""
    is_usual = (
        weight.device.type == "cpu" and weight.dtype in {torch.bfloat16, torch.float32} and weight.is_contiguous()
    )
    rows, columns = weight.shape
    if not is_usual or rows % UNIT or columns % UNIT:
        return None
    code = _dense(is_bf16=weight.dtype == torch.bfloat16)
    return weight_of_parts(code, [weight.detach()], rows=rows, columns=columns, takes_rounded=False)


def of_experts(weights: Sequence[NativeWeight | None]) -> NativeWeight | None:
    """Return the weights of a layer's experts as one, whose record has the addresses of theirs; None if one lacks."""
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(weights) or len({weight.code for weight in found}) != 1:
        return None
    addresses = [ctypes.addressof(weight.record) for weight in found]
    return replace(found[0], record=(ctypes.c_int64 * len(addresses))(*addresses), keeps=found)


@functools.cache
def _dense(*, is_bf16: bool) -> Compiled:
    from offload.native.dense import dense_module

    return compiled(str(dense_module(float_tiles(), is_bf16=is_bf16)))


def float_tiles() -> dict[int, int]:
    """Return how many rows of float32 are multiplied at once -> by how many of a weight: sums fill the registers.

    Beside one row are as many as hide what an instruction waits for, and as stream in from memory together.
    """
    return {4: 4, 2: 4, 1: 4} if has_wide_registers() else {3: 2, 2: 2, 1: 4}
