"""GPTQ: whole numbers of four or eight bits in 32-bit words, packed along the inputs; scale and zero for each group.

The first version of the format stores zero points less one, in whole words: a zero point of 0 borrows from its
neighbour, and adding one to each number of the word gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.formats.numbers import scale_groups, whole_numbers
from offload.formats.published import PublishedWeight, has_words, sibling, stored_matrices
from offload.stored_names import Pieces

WORD_BITS = 32
ONES = {4: 0x11111111, 8: 0x01010101}  # a one for each number of a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """The format, of both versions; a weight's shape says how many bits its numbers have."""

    name: str = "gptq"
    methods: tuple[str, ...] = ("gptq",)

    def detect(
        self, parameter: str, shape: tuple[int, ...], stored: Mapping[str, Pieces], stated: Mapping[str, Any]
    ) -> PublishedWeight | None:
        """Find the format by its words and what config.json states, which tells AWQ's apart."""
        if not has_words(parameter, stored, stated, self.name):
            return None
        leaves = ["qweight", "qzeros", "scales"]
        in_order = not stated.get("desc_act")
        if not in_order:
            leaves.append("g_idx")
        found = stored_matrices(parameter, shape, stored, {leaf: sibling(parameter, leaf) for leaf in leaves})
        rows, columns = found.rows, found.columns
        words = {bits: columns * bits // WORD_BITS for bits in (4, 8)}
        bits = 8 if found.shape("qweight") == (words[8], rows) else 4
        groups = found.num_groups(are_equal=in_order)
        each = WORD_BITS // bits
        parts = {
            "qweight": found.part("qweight", (words[4], rows), (words[8], rows), rows_dim=-1),
            "qzeros": found.part("qzeros", (groups, rows // each), rows_dim=-1, rows_each=each),
            "scales": found.part("scales", (groups, rows), rows_dim=-1),
        }
        if not in_order:
            parts["g_idx"] = found.part("g_idx", (columns,))
        is_first_version = stated.get("checkpoint_format") != "gptq_v2"
        return PublishedWeight(
            name=self.name,
            num_matrices=found.num_matrices,
            parts=parts,
            unpack_rows=partial(_unpack, bits=bits, zeros_less=ONES[bits] if is_first_version else 0),
        )


def _unpack(parts: Mapping[str, Tensor], out: Tensor, *, bits: int, zeros_less: int) -> None:
    """Write (qweight [n, i * bits / 32, r] - qzeros [n, G, r * bits / 32]) times scales [n, G, r]."""
    numbers = whole_numbers(parts["qweight"].mT, bits)
    zeros = whole_numbers(parts["qzeros"] + zeros_less, bits).mT  # [n, r, G]
    scale = parts["scales"].mT.float()
    if "g_idx" in parts:
        group = parts["g_idx"].long()[:, None].expand_as(numbers)
        torch.mul(numbers.sub_(zeros.gather(-1, group)), scale.gather(-1, group), out=out)
        return
    numbers.view(*zeros.shape, -1).sub_(zeros[..., None])
    scale_groups(numbers, scale, out)


GPTQ = Gptq()
