"""Tensors of a GGUF file that are computed when they are loaded: embeddings and heads in blocks, norms, some biases."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.gguf_blocks import BlockType

WEIGHTS_AT_ONCE = 1 << 18  # whose float32 numbers exist together


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedTensor:
    """A tensor in blocks, unpacked whole: perhaps with a number added, or with heads whose halves lie in turn."""

    shape: tuple[int, ...]
    block: BlockType
    added: float = 0.0  # to every number that is stored
    num_heads: int = 0  # of a vector whose heads have their two halves in turn

    def write(self, stored: Tensor, out: Tensor) -> None:
        """Write some blocks at a time."""
        blocks = stored.view(-1, self.block.num_bytes)
        if self.num_heads:
            numbers = self._numbers(blocks).view(self.num_heads, math.prod(self.shape) // self.num_heads // 2, 2)
            out.copy_(numbers.transpose(1, 2).reshape(-1))
            return
        place = out.view(-1, self.block.weights)
        step = WEIGHTS_AT_ONCE // self.block.weights
        for start in range(0, len(blocks), step):
            place[start : start + step].copy_(self._numbers(blocks[start : start + step]))

    def _numbers(self, blocks: Tensor) -> Tensor:
        numbers = torch.empty(len(blocks), self.block.weights)
        self.block.unpack(blocks, numbers)
        return numbers.add_(self.added) if self.added else numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTensor:
    """A tensor whose numbers are changed once all of them are unpacked."""

    shape: tuple[int, ...]
    stored: UnpackedTensor
    change: Callable[[Tensor], Tensor]  # float32 numbers in their stored shape -> those of the parameter

    def write(self, stored: Tensor, out: Tensor) -> None:
        """Write all numbers."""
        numbers = torch.empty(self.stored.shape)
        self.stored.write(stored, numbers.view(-1))
        out.copy_(self.change(numbers).reshape(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetIds:
    """A map of a draft's tokens, stored as the target's ids: its numbers are what is added to a token's own."""

    shape: tuple[int, ...]

    def write(self, stored: Tensor, out: Tensor) -> None:
        """Write all numbers."""
        ids = stored.clone().view(torch.int64)  # which lie at any place in a buffer
        out.copy_(ids - torch.arange(len(ids)))
