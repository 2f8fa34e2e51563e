"""What opening any published draft takes: its tensors by their parameters' names, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.draft.known_tokens_head import OutputFacts
from edgespec.draft.own_parts import OwnParts
from edgespec.draft.published import PublishedDraft
from edgespec.errors import EdgespecError, offload_errors
from edgespec.pair.folder import ModelFolder, read_json
from offload.checkpoint import Checkpoint, TensorEntry
from offload.formats.gguf_blocks import LEAVES
from offload.gguf.checkpoint import GGUF
from offload.gguf.entries import as_parameter
from offload.gguf.files import is_gguf
from offload.gguf.header import read_gguf
from offload.gguf.settings import config_fields
from offload.skeleton import build_on_meta, lent_names, stored_buffers


class StatedFacts(Protocol):
    """What a head or a drafter states."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it."""

    @property
    def verifier(self) -> str | None:
        """The target that it was made for, as it names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedDraft:
    """A head or a drafter that fits its target, as its kind reads it."""

    facts: StatedFacts
    layer: PretrainedConfig
    parts: OwnParts
    draft: PublishedDraft
    check_tensors: Callable[[Mapping[str, TensorEntry]], None]
    check_ids: Callable[[Checkpoint], None]  # the tokens that a tensor names
    parameter_name: Callable[[str], str | None]
    description: str


def open_stated(folder: Path, target: ModelFolder, stated: StatedDraft, checkpoint: Checkpoint) -> ModelFolder:
    """Return a head or a drafter as the draft of this target; a checkpoint without tensors is planned from the config.

    Raises EdgespecError where its tensors are not what it states.
    """
    facts, layer = stated.facts, stated.layer
    set_packing(layer, folder)
    with offload_errors():
        if checkpoint.tensors:
            stated.check_tensors(as_published(checkpoint))
            if not is_gguf(folder) or not read_gguf(folder, is_whole=False).missing_bytes:
                stated.check_ids(checkpoint)
            known = planned_parts(layer, stated.parts, folder).tensors
            tensors = renamed(stated.draft, checkpoint.tensors, stated.parameter_name, known=known)
            checkpoint = replace(checkpoint, tensors=tensors)
        else:
            checkpoint = planned_parts(layer, stated.parts, folder)
    return ModelFolder(
        folder=folder,
        config=layer,
        checkpoint=checkpoint,
        generation_config={},
        stated=draft_config(folder),
        parts=stated.parts,
        own_notes=(stated.description, *facts.notes, *note_of_target(facts.verifier, target)),
    )


def renamed(
    draft: PublishedDraft,
    tensors: Mapping[str, TensorEntry],
    parameter_name: Callable[[str], str | None],
    *,
    known: Collection[str] | None = None,
) -> dict[str, TensorEntry]:
    """Return tensors under their parameters' names, which are `known`; their own stay for messages.

    Those without a parameter are left out. Raises EdgespecError for one that has no place, and for two that have one.
    """
    found: dict[str, TensorEntry] = {}
    for stored, entry in tensors.items():
        module, _, leaf = stored.rpartition(".")
        is_packed = leaf in LEAVES
        name = parameter_name(f"{module}.weight" if is_packed else stored)
        if name is None:
            continue
        if known is not None and name not in known:
            raise draft.unknown_tensor(stored)
        name = f"{name.removesuffix('weight')}{leaf}" if is_packed else name
        if name in found:
            raise draft.wrong(f"has '{stored}' and '{found[name].name}', which are one weight")
        found[name] = entry
    return found


def as_published(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return a draft's tensors as its folder would hold them: those of a GGUF file as they are loaded."""
    return {one.name: one for one in map(as_parameter, checkpoint.tensors.values())}


def draft_config(path: Path) -> dict[str, Any]:
    """Return a draft's config.json, or what a GGUF file's settings are in one; raises EdgespecError."""
    if not is_gguf(path):
        return read_json(path / "config.json")
    with offload_errors():
        return config_fields(read_gguf(path, is_whole=False))


def set_packing(layer: PretrainedConfig, path: Path) -> None:
    """Say in the config of a draft's layers how they are packed, where a GGUF file has them."""
    if is_gguf(path):
        layer.quantization_config = {"quant_method": GGUF}


def planned_parts(layer: PretrainedConfig, parts: OwnParts, folder: Path) -> Checkpoint:
    """Return the tensors that a draft of this config would have."""
    dtype = layer.dtype if isinstance(layer.dtype, torch.dtype) else torch.bfloat16
    model = build_on_meta(layer, folder, dtype=dtype)
    parts.attach(model)
    lent = lent_names(model, parts.modules)
    own = {**dict(model.named_parameters()), **stored_buffers(model)}
    return Checkpoint(
        folder=folder,
        tensors={
            name: TensorEntry.planned(name, tuple(tensor.shape), tensor.dtype)
            for name, tensor in own.items()
            if name not in lent
        },
    )


def note_of_target(verifier: str | None, target: ModelFolder) -> tuple[str, ...]:
    """Return what is to be said where the head's makers name another target than this."""
    repository = target.folder.parent.parent.name  # of a snapshot in the Hugging Face cache: models--OWNER--NAME
    names = {target.folder.name, repository.rpartition("--")[2]}
    if verifier is None or verifier.rstrip("/").rpartition("/")[2] in names:
        return ()
    return (f"was made for '{verifier}', as it says: of another target it may draft badly",)


def check_ordering(draft: PublishedDraft, checkpoint: Checkpoint, *, vocab: int) -> None:
    """Raise EdgespecError where the order of an assistant's tokens is not one of all of them."""
    entry = checkpoint.tensors.get("masked_embedding.token_ordering")
    if entry is not None and not torch.equal(_numbers(entry).sort().values, torch.arange(vocab)):
        raise draft.wrong(f"has a 'masked_embedding.token_ordering' that is no order of {vocab} tokens")


def check_map(facts: OutputFacts, checkpoint: Checkpoint, *, vocab: int) -> None:
    """Raise EdgespecError where the map of the head's tokens leads out of the target's, or to one twice."""
    if not facts.has_map:
        return
    offsets = _numbers(next(one for name, one in checkpoint.tensors.items() if name.removeprefix("model.") == "d2t"))
    ids = torch.arange(offsets.shape[0]) + offsets
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().shape[0] < ids.shape[0]):
        raise EdgespecError(
            "E_DRAFT_FORM",
            f"'d2t' of '{facts.named}' leads out of the target's {vocab} tokens, or to one twice: it "
            "holds what is added to a token's own number, and no ids.",
            "Convert the head again, or download it again.",
        )


def _numbers(entry: TensorEntry) -> Tensor:
    """Return the whole numbers of a tensor."""
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        stored = torch.frombuffer(bytearray(file.read(entry.num_bytes)), dtype=torch.uint8)
    offsets = torch.empty(entry.parameter_shape, dtype=torch.int64) if entry.computed else stored.view(entry.dtype)
    if entry.computed:
        entry.computed.write(stored, offsets)
    return offsets.long()
