"""The format that each model's layers are packed in and the numbers they are computed in, from the user's words.

On a CPU a format whose weights are multiplied as they are packed comes before one that is unpacked in each pass.
Whether they are, the packed formats say: it takes the processor, the numbers to compute in and the weights' shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgespec.config import parse_quant
from edgespec.errors import EdgespecError
from edgespec.model.device import resolve_dtype
from edgespec.pair.folder import ModelFolder
from edgespec.placement.weights import MOST, weights_by_size
from offload.formats.known import KEPT
from offload.formats.stated import stated_packing

# What a word stands for where the device multiplies that format as it is packed, the fastest first
MULTIPLIED = {"auto": ("nf4-cpu", "int4"), "nf4": ("nf4-cpu",)}
AUTO_UNPACKED = "nf4"  # what `auto` is elsewhere: the least loss of the formats of four bits


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormats:
    """The numbers that layers are computed in, and what they are packed in; None: as their files have them."""

    dtype: torch.dtype
    quant: str | None
    draft_quant: str | None


def resolve_formats(
    target: ModelFolder,
    draft: ModelFolder | None,
    *,
    device: torch.device,
    dtype: str | torch.dtype = "auto",
    quant: str | None = None,
    draft_quant: str | None = None,
) -> NumberFormats:
    """Return the formats that the words stand for on this device; raises EdgespecError for an unknown word.

    The dtype 'auto' is bf16 on a CPU that multiplies the target's layers as they are packed: the products need it.
    """
    word, draft_word = parse_quant(quant), parse_quant(draft_quant, setting="draft_quant")
    resolved = resolve_dtype(dtype, target.config, device)
    possible = torch.bfloat16 if dtype == "auto" and device.type == "cpu" else resolved
    chosen = _format_to_pack(target, word, possible, device)
    if possible != resolved and chosen is not None and _multiplied_share(target, chosen, possible, device) > MOST:
        resolved = possible
    of_draft = None if draft is None else _format_to_pack(draft, draft_word, resolved, device)
    return NumberFormats(dtype=resolved, quant=chosen, draft_quant=of_draft)


def _format_to_pack(model: ModelFolder, word: str | None, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the format that a word stands for; None leaves the files as they are."""

    def share(quant: str) -> float:
        return _multiplied_share(model, quant, dtype, device)

    if word in {None, "auto"} and stated_packing(model.config) and share(KEPT) > MOST:
        return KEPT
    found = next((name for name in MULTIPLIED.get(word or "none", ()) if share(name) > MOST), None)
    if found is not None:
        return found
    if word == "auto":
        return AUTO_UNPACKED if share(AUTO_UNPACKED) >= 0 else None
    return None if word == "none" else word


def _multiplied_share(model: ModelFolder, quant: str, dtype: torch.dtype, device: torch.device) -> float:
    """Return the share of the layers' weights that would be multiplied as they are packed.

    It is less than 0 where they cannot be packed so, since they are published as small already.
    """
    try:
        weights = weights_by_size(model, dtype=dtype, quant=quant)
    except EdgespecError as error:
        if error.code != "E_QUANTIZED":
            raise
        return -1.0
    return weights.skeleton.multiplied_share(dtype, device)
