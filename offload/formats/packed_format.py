"""What a packed format does: it is found by its tensors, laid out, packed where we can, and unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.errors import CheckpointError
from offload.stored_names import Pieces

BLOCK_SIZE = 64  # a matrix that is packed here has a multiple of so many weights, whatever the format
WEIGHTS_AT_ONCE = 1 << 20  # whose temporaries exist together while a weight is packed


class PackedFormat(Protocol):
    """The way in which a weight is packed.

    The one that stands in `known.FORMATS` describes what we pack. `detect` and `pack` return one with the facts of
    a single weight. A weight is packed as several parts, which stream like any other parameters.
    """

    @property
    def name(self) -> str:
        """What a user calls the format."""

    @property
    def method(self) -> str:
        """The `quant_method` that config.json states for checkpoints in this format."""

    @property
    def can_pack(self) -> bool:
        """Return whether weights can be packed here; `pack` and `states` are called only then."""

    def detect(self, parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces]) -> PackedFormat | None:
        """Return how the checkpoint packs a parameter of this shape; None where it is not in this format.

        Raises CheckpointError where it is in this format and cannot be unpacked.
        """

    def part_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the parts of a weight of this shape: part -> (shape, dtype)."""

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return part -> its name in a checkpoint."""

    def states(self, parameter: str, shape: tuple[int, ...]) -> dict[str, bytes]:
        """Return what is stored beside the parts: name in a checkpoint -> content.

        It is read once and never streamed.
        """

    def pack(self, weight: Tensor) -> tuple[PackedFormat, dict[str, Tensor]]:
        """Return the weight's own format, and its parts, on the weight's device."""

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Return the weight, written to `out` in the dtype of `out`."""


def cannot_be_used(parameter: str, reason: str) -> CheckpointError:
    """Return the error for a packed weight of a checkpoint."""
    return CheckpointError(
        "E_QUANTIZED",
        f"the quantised weight '{parameter}' cannot be used: {reason}.",
        "Use the model's bf16 or fp16 safetensors, with `quant=nf4` or int8.",
    )


def content_of(entry: TensorEntry) -> bytes:
    """Return the bytes of a small tensor; none where it is only planned."""
    if not entry.file.name:
        return b""
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.num_bytes)
