"""The format that each model's layers are packed in and the numbers they are computed in, from the user's words.

On a CPU a format whose weights are multiplied as they are packed comes before one that is unpacked in each pass.
Whether they are, the packed formats say: it takes the processor, the numbers to compute in and the weights' shapes.
"""

from dataclasses import dataclass

import torch

from edgespec.config import parse_quant
from edgespec.draft.own_parts import is_copy
from edgespec.errors import EdgespecError
from edgespec.machine.device import resolve_dtype
from edgespec.machine.host_memory import free_host_bytes
from edgespec.model.layer_kinds import chosen_experts
from edgespec.pair.folder import ModelFolder
from edgespec.placement.weights import MOST, Weights, weights_by_size
from offload.experts.expert_source import HOST
from offload.formats.stated import format_stated, stated_packing
from offload.layouts.known import REPACKED, kernel_of, quantizer
from offload.quantize import LARGEST_SHARE
from offload.unpacked_once import layout_when_loaded, share_when_loaded

# What a word stands for where the device multiplies that format as it is packed, the fastest first; others are formats
MULTIPLIED = {None: (), "none": (), "auto": ("nf4-cpu", "int4"), "nf4": ("nf4-cpu",)}
# What may come before that where weights are published packed; None: as they are
PUBLISHED = {None: (None, REPACKED), "auto": (REPACKED,)}
# Weights that are repacked may take so many times their published bytes; more only where all of them fit the RAM
MOST_GROWTH = 1.4
ROOM_BYTES = 2 << 30  # of the free RAM, for caches, activations and others
INSTEAD = "Name a small draft of its tokens, or none: what the text had before is looked up all the same"
AUTO_UNPACKED = "nf4"  # what `auto` is elsewhere: the least loss of the formats of four bits
SAMPLE_SHAPE = (1024, 1024)  # a weight that every kernel takes


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormats:
    """The numbers that layers are computed in, and what they are packed in.

    None: as their files have them, or in a compute layout once they are loaded; none: in no layout at all.
    """

    dtype: torch.dtype
    quant: str | None
    draft_quant: str | None


def resolve_formats(
    target: ModelFolder,
    draft: ModelFolder | None,
    *,
    device: torch.device,
    dtype: str | torch.dtype = "auto",
    quants: tuple[str | None, str | None] = (None, None),
    expert_mode: str = "auto",
    max_cpu_bytes: int | None = None,
) -> NumberFormats:
    """Return the formats that the words stand for on this device; raises EdgespecError for an unknown word.

    `quants` are the target's word and the draft's.
    A mixture whose experts a CPU computes beside a card is packed for the CPU: experts are most of it.

    The dtype 'auto' is bf16 on a CPU that multiplies the target's layers as they are packed: the products need it.
    Layouts that take far more bytes than the published ones are for models that fit `max_cpu_bytes`, or what is free.
    """
    word, draft_word = parse_quant(quants[0]), parse_quant(quants[1], setting="draft_quant")
    resolved = resolve_dtype(dtype, target.config, device)
    possible = torch.bfloat16 if dtype == "auto" and device.type == "cpu" else resolved
    num_experts, _ = chosen_experts(target.config.get_text_config(decoder=True))
    multiplier = HOST if num_experts and expert_mode == "cpu" else device
    chosen, is_multiplied = _format_to_pack(target, word, possible, multiplier, max_cpu_bytes)
    resolved = possible if is_multiplied else resolved
    of_draft: str | None
    if draft is not None and is_copy(draft.parts):
        of_draft = _format_of_copy(draft, draft_word, resolved, device, of_target=chosen)
    else:
        of_draft = None if draft is None else _format_to_pack(draft, draft_word, resolved, device, max_cpu_bytes)[0]
    return NumberFormats(dtype=resolved, quant=chosen, draft_quant=of_draft)


def _format_of_copy(
    copy: ModelFolder, word: str | None, dtype: torch.dtype, device: torch.device, *, of_target: str | None
) -> str:
    """Return the format of a target's own copy: the fastest one of its word here.

    Raises EdgespecError where that is named twice, and where the target is packed as small already.
    """
    assert copy.parts is not None
    if word is not None:
        what = f"`draft_quant={word}` does not apply to the target's own copy, whose format stands in its name."
        raise EdgespecError("E_SETTING", what, "Leave it out, and use `draft=self:nf4` or `draft=self:int4`.")
    word = str(copy.parts.copied_as)
    fast = (quant for quant in MULTIPLIED.get(word, (word,)) if _is_multiplied(copy, quant, dtype, device, None))
    chosen = next(fast, AUTO_UNPACKED if word == "auto" else word)
    is_packed = of_target in {AUTO_UNPACKED, *MULTIPLIED["auto"]}
    if is_packed or not _is_smaller(copy, chosen, dtype):
        stated = format_stated(stated_packing(copy.config))
        how = f"is to be packed as {of_target}" if is_packed else f"is packed as {stated}" if stated else "is small"
        what = f"'{copy.folder}' {how}, and its layers would hardly be smaller as {chosen}: it cannot draft for itself."
        raise EdgespecError("E_DRAFT_FORM", what, f"{INSTEAD}.")
    return chosen


def _is_smaller(model: ModelFolder, quant: str, dtype: torch.dtype) -> bool:
    """Return whether a model's layers become clearly smaller in a format."""
    stored = weights_by_size(model, dtype=dtype, quant=None).skeleton
    stored_bytes = sum(record.stored_bytes for record in stored.records)
    model.spare[dtype] = stored
    packed = _packed(model, quant, dtype)
    if packed is None:
        return False
    return sum(record.stored_bytes for record in packed.skeleton.records) <= LARGEST_SHARE * stored_bytes


def quant_named(model: ModelFolder | None, quant: str | None) -> str:
    """Return the name of a model's format in what is kept of a run.

    Packed weights that may be repacked at load are `published`, and `none` where they may not; others are `none`.
    """
    is_published = model is not None and stated_packing(model.config)
    return quant or ("published" if is_published else "none")


def _format_to_pack(
    model: ModelFolder, word: str | None, dtype: torch.dtype, device: torch.device, max_cpu_bytes: int | None
) -> tuple[str | None, bool]:
    """Return the format that a word stands for, and whether layers are multiplied as it packs them.

    Or in a layout that they are put in when they are loaded. None and none leave the files as they are.
    """
    is_published = bool(stated_packing(model.config))
    as_published = PUBLISHED.get(word, ()) if is_published else ()
    for quant in (*as_published, *MULTIPLIED.get(word, (word,))):
        if _is_multiplied(model, quant, dtype, device, max_cpu_bytes):
            return quant, True
    if word is None and is_published and device.type == "cpu":
        is_multiplied = (
            share_when_loaded(weights_by_size(model, dtype=dtype, quant=None).skeleton, dtype, device) > MOST
        )
        return None, is_multiplied
    if word == "auto":
        is_too_small = is_published and _packed(model, AUTO_UNPACKED, dtype) is None
        return None if is_too_small else AUTO_UNPACKED, False
    return word, False


def _is_multiplied(
    model: ModelFolder, quant: str | None, dtype: torch.dtype, device: torch.device, max_cpu_bytes: int | None
) -> bool:
    """Return whether most of the layers' weights would be multiplied as they are packed, in not too many bytes.

    The model is only looked at for a format that has a kernel here, and for what is repacked.
    """
    own = None if quant in {None, REPACKED} else quantizer(quant)
    if device.type != "cpu" or (own is not None and kernel_of(own, SAMPLE_SHAPE, dtype, device) is None):
        return False
    weights = _packed(model, quant, dtype)
    if weights is None or not weights.is_multiplied_packed(device):
        return False
    skeleton = weights.skeleton
    if quant is None and any(layout_when_loaded(skeleton, packed, device) for packed in skeleton.packed):
        return False  # a layout that they are put in is faster
    return quant != REPACKED or _may_grow(model, weights, max_cpu_bytes)


def _may_grow(model: ModelFolder, repacked: Weights, max_cpu_bytes: int | None) -> bool:
    """Return whether layers that are repacked take few more bytes than published, or fit the RAM."""
    outside_bytes = repacked.skeleton.outside.stored_bytes
    published_bytes = sum(entry.num_bytes for entry in model.checkpoint.tensors.values()) - outside_bytes
    repacked_bytes = sum(record.stored_bytes for record in repacked.skeleton.records)
    if repacked_bytes <= MOST_GROWTH * published_bytes:
        return True
    room_bytes = max_cpu_bytes if max_cpu_bytes is not None else free_host_bytes() - ROOM_BYTES
    return repacked_bytes + outside_bytes <= room_bytes


def _packed(model: ModelFolder, quant: str | None, dtype: torch.dtype) -> Weights | None:
    """Return the weights as they would be packed, to be looked at; None where they are published as small already."""
    try:
        weights = weights_by_size(model, dtype=dtype, quant=quant)
    except EdgespecError as error:
        if error.code != "E_QUANTIZED":
            raise
        return None
    model.spare[dtype] = weights.skeleton
    return weights
