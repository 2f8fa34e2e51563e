"""Tensors that are no parameter as they lie: what llama.cpp's converter split, joined, transposed or computed."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.formats.gguf_blocks import UNPACKED
from offload.gguf.entries import entry, experts, matrices_of, matrix, numbered, packed, unpacked
from offload.gguf.family import Part
from offload.gguf.header import GgufTensor
from offload.gguf.storage_types import ChangedTensor, UnpackedTensor

Fields = Mapping[str, Any]
WHOLE = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def named(name: str) -> Part:
    """Return the part that is a parameter of this whole name, in numbers of its stored shape."""
    return shaped(name, lambda shape: shape)


def shaped(name: str, shape_of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Part:
    """Return the part that has other dimensions in the file."""

    def part(layer: str, tensor: GgufTensor, _: Fields) -> Iterator[TensorEntry]:
        yield unpacked(layer + name, replace(tensor, shape=shape_of(tensor.shape)))

    return part


def vector(name: str) -> Part:
    """Return the part that is a column, or in groups, in the file."""
    return shaped(name, lambda shape: (math.prod(shape),))


def convolution(name: str) -> Part:
    """Return the part that is a convolution of each channel: [channels, width] -> [channels, 1, width]."""
    return shaped(name, lambda shape: (shape[0], 1, *shape[1:]))


def logarithm(name: str) -> Part:
    """Return the part that is stored as minus its exponential."""

    def part(layer: str, tensor: GgufTensor, _: Fields) -> Iterator[TensorEntry]:
        yield changed(layer + name, tensor, (math.prod(tensor.shape),), logarithm_of)

    return part


def logarithm_of(stored: Tensor) -> Tensor:
    """Return the numbers whose exponentials are stored with a minus, each rounded once."""
    return (-stored.double()).log().float()


def changed(name: str, tensor: GgufTensor, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> TensorEntry:
    """Return a tensor whose numbers are computed when it is loaded."""
    computed = ChangedTensor(shape=shape, stored=UnpackedTensor(shape=tensor.shape, block=tensor.block), change=change)
    return entry(name, tensor, (tensor.num_bytes,), computed=computed)


def experts_in(module: str, projections: tuple[str, str, str] = PROJECTIONS) -> dict[str, Part]:
    """Return the parts of a layer's experts, published one by one: gate, up, down."""

    def part(layer: str, tensor: GgufTensor, _: Fields, *, projection: str) -> Iterator[TensorEntry]:
        yield from experts(layer + module, projection, tensor)

    return {name: partial(part, projection=one) for name, one in zip(WHOLE, projections, strict=True)}


def one_of(module: str, place: int, count: int = 1, *, leaf: str = ".weight") -> Part:
    """Return the part whose matrices are each the `place`-th of `count` that follow each other in a parameter."""

    def part(layer: str, tensor: GgufTensor, _: Fields) -> Iterator[TensorEntry]:
        each = matrices_of(tensor) if len(tensor.shape) > 2 else [tensor]
        for number, one in enumerate(each):
            found = unpacked(f"{layer}{module}{leaf}", one) if one.block.is_unpacked else packed(layer + module, one)
            yield numbered(found, number * count + place)

    return part


def fused(
    parameter: str, place: int = 0, count: int = 1, *, is_transposed: bool = False, is_in_turn: bool = False
) -> Part:
    """Return the part of experts in one parameter, which may have them transposed, or rows of `count` in turn."""

    def part(layer: str, tensor: GgufTensor, _: Fields) -> Iterator[TensorEntry]:
        for number, one in enumerate(matrices_of(tensor)):
            is_unpacked = one.block.is_unpacked and not is_in_turn
            found = unpacked(layer + parameter, one) if is_unpacked else packed(layer + parameter, one)
            found = replace(found, is_transposed=is_transposed, is_in_turn=is_in_turn)
            yield numbered(found, number * count + place)

    return part


def in_turn(parameter: str, place: int) -> Part:
    """Return the part whose numbers and those of another tensor are in turn in the parameter."""

    def part(layer: str, tensor: GgufTensor, _: Fields) -> Iterator[TensorEntry]:
        found = entry(layer + parameter, tensor, tensor.shape, dtype=UNPACKED[tensor.block.name])
        yield numbered(replace(found, is_in_turn=True), place)

    return part


def module(name: str) -> Part:
    """Return the part that is a module's matrix as it lies."""

    def part(layer: str, tensor: GgufTensor, _: Fields) -> Iterator[TensorEntry]:
        yield matrix(layer + name, tensor)

    return part


def keys_of_heads(module: str) -> Part:
    """Return the part of keys [heads, rank, rows], which are transposed and lie before each head's values."""

    def part(layer: str, tensor: GgufTensor, _: Fields) -> Iterator[TensorEntry]:
        for head, one in enumerate(matrices_of(tensor)):
            yield numbered(changed(f"{layer}{module}.weight", one, one.shape[::-1], torch.t), 2 * head)

    return part


def values_of_heads(module: str) -> Part:
    """Return the part of values [heads, rows, rank], which lie behind each head's keys."""

    def part(layer: str, tensor: GgufTensor, _: Fields) -> Iterator[TensorEntry]:
        for head, one in enumerate(matrices_of(tensor)):
            computed = UnpackedTensor(shape=one.shape, block=one.block)
            yield numbered(entry(f"{layer}{module}.weight", one, (one.num_bytes,), computed=computed), 2 * head + 1)

    return part
