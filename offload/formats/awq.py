"""AWQ: whole numbers of four bits in 32-bit words, packed along the outputs in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.formats.numbers import bytes_of, scale_groups
from offload.formats.published import PublishedWeight, has_words, sibling, stored_matrices
from offload.stored_names import Pieces

NUMBERS_A_WORD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """The format; it has no settings."""

    name: str = "awq"
    methods: tuple[str, ...] = ("awq",)

    def detect(
        self, parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces], stated: Mapping[str, Any]
    ) -> PublishedWeight | None:
        """Find the format by its words and what config.json states, which tells GPTQ's apart."""
        if not has_words(parameter, stored, stated, self.name):
            return None
        names = {leaf: sibling(parameter, leaf) for leaf in ("qweight", "qzeros", "scales")}
        found = stored_matrices(parameter, shape, stored, names)
        rows, columns = found.rows, found.columns
        groups = found.num_groups()
        words = rows // NUMBERS_A_WORD
        parts = {
            "qweight": found.part("qweight", (columns, words), rows_dim=-1, rows_each=NUMBERS_A_WORD),
            "qzeros": found.part("qzeros", (groups, words), rows_dim=-1, rows_each=NUMBERS_A_WORD),
            "scales": found.part("scales", (groups, rows), rows_dim=-1),
        }
        return PublishedWeight(name=self.name, num_matrices=found.num_matrices, parts=parts, unpack_rows=_unpack)


def _unpack(parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Write (qweight [n, i, r / 8] - qzeros [n, G, r / 8]) times scales [n, G, r]."""
    scale = parts["scales"].mT.float()
    numbers, zeros = _numbers(parts["qweight"]), _numbers(parts["qzeros"])
    numbers.view(*zeros.shape, -1).sub_(zeros[..., None])
    scale_groups(numbers, scale, out)


def _numbers(words: Tensor) -> Tensor:
    """Return the numbers of words [n, m, r / 8] in rows: float32 [n, r, m].

    The halves of a word's four bytes are rows 0 2, 4 6, 1 3, 5 7: byte 2 a + b holds rows a + 4 b + 2 c, c = 0 in its
    low half.
    """
    packed = bytes_of(words).mT.contiguous().unflatten(1, (-1, 2, 2)).transpose(2, 3)  # [n, r / 8, b, a, m]
    num_matrices, eighths, _, _, columns = packed.shape
    found = torch.empty(num_matrices, eighths, 2, 2, 2, columns, device=words.device)  # [n, r / 8, b, c, a, m]
    found[:, :, :, 0].copy_(packed & 15)
    found[:, :, :, 1].copy_(packed >> 4)
    return found.view(num_matrices, 8 * eighths, columns)


AWQ = Awq()
