"""A model's folder becomes a skeleton that can be placed, and then one that can be loaded.

The two differ where weights are to be quantised: placing needs only their sizes, and comes before gigabytes are
written.
"""

import errno
import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from edgespec.errors import offload_errors
from edgespec.model.layer_kinds import chosen_experts
from edgespec.pair.folder import ModelFolder
from edgespec.user_paths import KERNELS, cache_folder, cache_of_process
from offload.adapters.fit import FittedAdapter, fitted
from offload.errors import CheckpointError
from offload.formats.stated import format_stated, stated_packing
from offload.layouts.known import REPACKED
from offload.native.compiler import keep_in
from offload.placement import GIB
from offload.quantize import quantized_checkpoint
from offload.quantized_cache import load_or_quantize
from offload.skeleton import Skeleton
from offload.unpacked_once import lent_bytes

# Why nothing can be kept in a place at all; a full disk is another matter
NO_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST}
AS_STORED = "none"  # of `quant`: nor are weights put in a form of a kernel when they are loaded
MOST = 0.5  # of the layers' weights: as many are multiplied as they are packed, or a format is not chosen for that
MUCH_BYTES = GIB // 4  # that a draft borrows, so that it is said
Announce = Callable[[Path, int, int], None]  # folder, bytes that will be written there, bytes free
Progress = Callable[[int, int], None]  # layers done, layers in all

keep_in(lambda: cache_folder() / KERNELS)
logger = logging.getLogger("edgespec.placement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One model's weights in the form they are to be used in."""

    model: ModelFolder
    dtype: torch.dtype
    quant: str | None
    skeleton: Skeleton  # matched with tensors of which some may still have to be made
    adapters: tuple[FittedAdapter, ...] = ()

    @property
    def formats(self) -> str | None:
        """The formats of packed weights, as published or as they are to be packed; None where none are packed."""
        formats = ", ".join(self.skeleton.packed_formats) or None
        is_repacked = self.quant == REPACKED
        return f"{formats} (from {format_stated(stated_packing(self.model.config))})" if is_repacked else formats

    def is_multiplied_packed(self, device: torch.device) -> bool:
        """Return whether a CPU multiplies most of the layers' weights as they are packed."""
        return device.type == "cpu" and self.skeleton.multiplied_share(self.dtype, device) > MOST

    def notes_of_packing(self, device: torch.device) -> tuple[str, ...]:
        """Return what is to be said of weights that other numbers would let the device multiply as they are packed."""
        share_in = functools.partial(self.skeleton.multiplied_share, device=device)
        if self.quant is None or share_in(self.dtype) > MOST or share_in(torch.bfloat16) <= MOST:
            return ()
        return (f"{self.formats} weights are unpacked in each pass; `dtype=bfloat16` multiplies them as they are",)

    @property
    def num_parameters(self) -> int:
        """The number of the model's weights; packed ones count as the weights that they stand for."""
        weights = {weight for module in self.skeleton.packed for _, weight in module.weights}  # tied ones once
        packed = [math.prod(weight.shape) for weight in weights]
        plain = [
            math.prod(tensor.shape)
            for record in (*self.skeleton.records, self.skeleton.outside, self.skeleton.tables)
            for name, tensor in record.tensors.items()
            if "_packed." not in name
        ]
        return sum(packed) + sum(plain)

    @property
    def token_bytes(self) -> float:
        """The bytes that a pass over one token reads: the layers, of experts those that are chosen, and the head."""
        num_experts, share = chosen_experts(self.skeleton.model.config.get_text_config(decoder=True))
        head = self.skeleton.model.get_output_embeddings()
        head_bytes = 0 if head is None else math.prod(head.weight.shape) * self.dtype.itemsize
        layers_bytes = sum(
            tensor.num_bytes * (share if len(tensor.shape) == 3 and tensor.shape[0] == num_experts else 1.0)
            for record in self.skeleton.records
            for tensor in record.tensors.values()
        )
        return float(head_bytes + layers_bytes)

    @property
    def unread_notes(self) -> tuple[str, ...]:
        """Return in words what of the folder is left out, or stays in its files."""
        skeleton, notes = self.skeleton, []
        if skeleton.tower is not None:
            notes.append(
                f"the text part of {self.model.config.model_type}: its tower of {skeleton.num_unread / 1e9:.3g} B "
                "weights is read when a picture comes"
            )
        elif skeleton.num_unread:
            notes.append(
                f"the text part of {self.model.config.model_type}: {skeleton.num_unread / 1e9:.3g} B weights for "
                "images or sounds are not read"
            )
        tables = skeleton.tables.tensors.values()
        if tables:
            count, num_bytes = sum(math.prod(table.shape) for table in tables), skeleton.tables.stored_bytes
            notes.append(
                f"{count / 1e9:.3g} B weights in tables, {num_bytes / GIB:.3f} GiB, stay in their files: a pass looks "
                "up few of their rows"
            )
        if skeleton.surplus:
            count, kind = len(skeleton.surplus), type(skeleton.model).__name__
            notes.append(
                f"'{skeleton.surplus[0]}'{f' and {count - 1} more weights' if count > 1 else ''} of the folder "
                f"{'are' if count > 1 else 'is'} no part of {kind} as config.json describes it, and not read"
            )
        return tuple(notes)

    def loadable(self, device: torch.device, *, announce: Announce | None, progress: Progress | None) -> Skeleton:
        """Return the skeleton of files that exist: the folder's, or quantised ones, which are made now if need be.

        It has the module graph of this one, which is not used any more. Where no file can be made, weights that were to
        be kept in another format are used as they are published.
        """
        if self.quant is None:
            return self.skeleton
        source = self.model.match_again(self.skeleton, self.model.checkpoint)
        quantized = functools.partial(
            load_or_quantize,
            source,
            self.model.checkpoint,
            self.quant,
            device=device,
            announce=announce,
            progress=progress,
        )
        try:
            try:
                checkpoint = quantized(cache_folder=cache_folder())
            except CheckpointError as error:
                if getattr(error.__cause__, "errno", None) not in NO_PLACE:
                    raise
                checkpoint = quantized(cache_folder=cache_of_process(error))
        except CheckpointError as error:
            if self.quant != REPACKED:
                raise
            logger.warning("packed weights are used as they are published, which is slower: %s", error)
            return self.model.match_again(source, self.model.checkpoint)
        return self.model.match_again(source, checkpoint)


def notes_of_weights(
    target: Weights, draft: Weights | None, *, context_tokens: int, device: torch.device
) -> tuple[str, ...]:
    """Return what is to be said of packed weights, and of a draft that knows shorter texts, or cannot pay."""
    notes = target.notes_of_packing(device)
    if draft is None:
        return notes
    return (*notes, *draft.notes_of_packing(device), *_notes_of_draft(target, draft, context_tokens))


def _notes_of_draft(target: Weights, draft: Weights, context_tokens: int) -> tuple[str, ...]:
    """Return what is to be said of a draft that knows shorter texts than there may be, borrows much, or cannot pay."""
    limit = draft.model.max_context or context_tokens
    short = (
        f"the draft has positions for {limit} tokens, and texts may have {context_tokens}: trees end there, and longer "
        "texts go on without them",
    )
    borrowed_bytes = lent_bytes(target.skeleton, lends=bool(draft.skeleton.lent))
    borrows = (
        "the draft borrows the target's embeddings and head, which are unpacked whole for it: "
        f"{borrowed_bytes / GIB:.3f} GiB (in the plan with the target's)",
    )
    return (
        (short if limit < context_tokens else ())
        + (borrows if borrowed_bytes >= MUCH_BYTES else ())
        + _note_of_costs(target, draft)
    )


def _note_of_costs(target: Weights, draft: Weights) -> tuple[str, ...]:
    """Return what is to be said where every token that the draft proposes costs a pass, or more."""
    if draft.token_bytes < target.token_bytes:
        return ()
    ours, theirs = (f"{weights.token_bytes / GIB:.3f} GiB" for weights in (target, draft))
    ways = "use a smaller one or" if draft.formats else "use a smaller one, `draft_quant`, or"
    return (
        f"the draft costs more than it can bring: for each token it reads {theirs} of weights, and the target {ours}; "
        f"{ways} `policy=none`",
    )


def weights_by_size(model: ModelFolder, *, dtype: torch.dtype, quant: str | None) -> Weights:
    """Return the model's weights, known by size; raises EdgespecError when they do not make up the model."""
    with offload_errors():
        skeleton = model.skeleton(model.checkpoint, dtype=dtype)
        if quant == AS_STORED:
            skeleton, quant = replace(skeleton, may_repack=False), None
        if quant is not None:
            skeleton = model.match_again(skeleton, quantized_checkpoint(skeleton, model.checkpoint, quant))
        adapters = tuple(fitted(given.adapter, given.name, skeleton) for given in model.adapters)
    return Weights(model=model, dtype=dtype, quant=quant, skeleton=skeleton, adapters=adapters)
