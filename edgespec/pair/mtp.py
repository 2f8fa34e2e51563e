"""A target's own multi-token-prediction layer is opened as its draft: only the layer's tensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.draft.draft_kind import INSTEAD
from edgespec.draft.mtp import (
    COUNT_KEYS,
    MTP_PARTS,
    NAMED,
    NUMBERED,
    WITHOUT_NORM,
    MtpNames,
    mtp_config,
    mtp_names,
)
from edgespec.draft.published import PublishedDraft
from edgespec.errors import EdgespecError
from edgespec.hub.names import MTP
from edgespec.pair.folder import ModelFolder
from edgespec.pair.published import planned_parts, renamed
from edgespec.pair.side_layer import layer_beside, read_side_layer
from offload.errors import OffloadError
from offload.gguf.checkpoint import GGUF
from offload.gguf.files import is_gguf
from offload.gguf.header import read_gguf
from offload.gguf.mixture_rules import states_further_layers

DESCRIPTION = "is the target's own multi-token-prediction layer"
MISSING = "states a multi-token-prediction layer, and its file has none"
UNREAD = "has a multi-token-prediction layer of its own, which cannot draft here"


def open_mtp(target: ModelFolder, side: Path | None = None) -> ModelFolder:
    """Return a target's layer as its draft; that of a bare config.json is planned.

    It is in the target's own checkpoint, or in a GGUF file: the one at `side`, or one beside the target's. Raises
    EdgespecError where the target has none, or one that is not read.
    """
    text = target.config.get_text_config(decoder=True)
    names = _checked_names(target, is_gguf=is_gguf(target.folder))
    if side is None and not names.of_layer(target.checkpoint.tensors):
        side = layer_beside(target)
    config = mtp_config(text)
    packing = getattr(target.config, "quantization_config", None)
    source, parts = target.checkpoint, MTP_PARTS
    if side is not None:
        layer_file = read_side_layer(side)
        layer_file.check_fits(text)
        names, packing, source = _checked_names(target, is_gguf=True), {"quant_method": GGUF}, layer_file.checkpoint
    if packing is not None:
        config.quantization_config = packing
    stored = names.of_layer(source.tensors)
    if stored:
        layer = PublishedDraft("multi-token-prediction layer of", str(source.folder))
        tensors = renamed(layer, {name: source.tensors[name] for name in stored}, partial(names.parameter, layer=layer))
        checkpoint = replace(source, tensors=tensors)
        parts = MTP_PARTS if "model.norm.weight" in tensors else WITHOUT_NORM
    elif not all(entry.is_planned for entry in target.checkpoint.tensors.values()) or not _stated(target.stated):
        states = ", though its settings state one" if _stated(target.stated) else ""
        raise _refusal(target, f"has no multi-token-prediction layer{states}")
    else:
        checkpoint = planned_parts(config, MTP_PARTS, target.folder)
    return ModelFolder(
        folder=source.folder,
        config=config,
        checkpoint=checkpoint,
        generation_config={},
        stated={**target.stated, "edgespec_draft": str(MTP)},
        parts=parts,
        word=MTP if side is None else None,
        own_notes=(_description(target, side),),
    )


def own_draft(target: ModelFolder) -> tuple[ModelFolder, ModelFolder | None]:
    """Return the target, and its own layer as its draft where it has one; the target says what one cannot be read for.

    A config.json alone has what it states.
    """
    text, from_gguf = target.config.get_text_config(decoder=True), is_gguf(target.folder)
    names = mtp_names(text, is_gguf=from_gguf)
    if names is None:
        is_unread = from_gguf and _stated(target.stated)
        return with_note(target, f"{UNREAD}: of {text.model_type} it is not read") if is_unread else target, None
    if not names.of_layer(target.checkpoint.tensors) and layer_beside(target) is None:
        is_planned = all(entry.is_planned for entry in target.checkpoint.tensors.values())
        if from_gguf and _stated(target.stated):
            return with_note(target, MISSING), None
        if not is_planned or not _stated(target.stated):
            return target, None
    try:
        return target, open_mtp(target)
    except (EdgespecError, OffloadError) as error:  # nobody has named it: the target runs without it
        return with_note(target, f"{UNREAD}: {error.what.removesuffix('.')}"), None


def with_note(model: ModelFolder, note: str) -> ModelFolder:
    """Return a model of which that is to be said."""
    return replace(model, own_notes=(*model.own_notes, note))


def without_description(layer: ModelFolder) -> ModelFolder:
    """Return a layer's folder without the note that it is one, which another line says too."""
    return replace(layer, own_notes=tuple(note for note in layer.own_notes if note != DESCRIPTION))


def _description(target: ModelFolder, side: Path | None) -> str:
    """Return in words where the layer comes from."""
    if side is not None:
        return f"{DESCRIPTION}, from '{side.name}'"
    if is_gguf(target.folder) and not states_further_layers(read_gguf(target.folder, is_whole=False)):
        return f"{DESCRIPTION}, which its file has and does not state"
    return DESCRIPTION if _stated(target.stated) <= 1 else f"{DESCRIPTION}: the first of several"


def _checked_names(target: ModelFolder, *, is_gguf: bool) -> MtpNames:
    names = mtp_names(target.config.get_text_config(decoder=True), is_gguf=is_gguf)
    if names is None:
        model_type = target.config.get_text_config(decoder=True).model_type
        known = ", ".join(sorted(NUMBERED | NAMED))
        what = f"is of the type '{model_type}', and the layer of these types is read: {known}"
        raise _refusal(target, what)
    return names


def _refusal(target: ModelFolder, what: str) -> EdgespecError:
    what = f"the draft is to be the target's own layer, and '{target.folder}' {what}."
    return EdgespecError("E_DRAFT_FORM", what, f"{INSTEAD}.")


def _stated(config: Mapping[str, Any]) -> int:
    """Return how many such layers a config states that its checkpoint has."""
    inner = config.get("text_config")
    parts = [config, *([inner] if isinstance(inner, Mapping) else [])]
    return max(int(part.get(key) or 0) for part in parts for key in COUNT_KEYS)
