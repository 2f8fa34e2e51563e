"""A target's own multi-token-prediction layer is opened as its draft: only the layer's tensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from edgespec.draft.draft_kind import INSTEAD
from edgespec.draft.mtp import COUNT_KEYS, MTP_PARTS, NAMED, NUMBERED, MtpNames, mtp_config, mtp_names
from edgespec.draft.published import PublishedDraft
from edgespec.errors import EdgespecError
from edgespec.hub.names import MTP
from edgespec.pair.folder import ModelFolder
from edgespec.pair.published import planned_parts, renamed
from offload.errors import OffloadError
from offload.gguf.files import is_gguf

DESCRIPTION = "is the target's own multi-token-prediction layer"
UNREAD = "has a multi-token-prediction layer of its own, which cannot draft here"


def open_mtp(target: ModelFolder) -> ModelFolder:
    """Return a target's layer as its draft; that of a bare config.json is planned.

    Raises EdgespecError where the target has none, or one that is not read.
    """
    names = _checked_names(target)
    config = mtp_config(target.config.get_text_config(decoder=True))
    packing = getattr(target.config, "quantization_config", None)
    if packing is not None:
        config.quantization_config = packing
    stored = names.of_layer(target.checkpoint.tensors)
    if stored:
        layer = PublishedDraft("multi-token-prediction layer of", str(target.folder))
        tensors = {name: target.checkpoint.tensors[name] for name in stored}
        tensors = renamed(layer, tensors, partial(names.parameter, layer=layer))
        checkpoint = replace(target.checkpoint, tensors=tensors)
    elif not all(entry.is_planned for entry in target.checkpoint.tensors.values()) or not _stated(target.stated):
        raise _refusal(target, "has no multi-token-prediction layer")
    else:
        checkpoint = planned_parts(config, MTP_PARTS, target.folder)
    return ModelFolder(
        folder=target.folder,
        config=config,
        checkpoint=checkpoint,
        generation_config={},
        stated={**target.stated, "edgespec_draft": str(MTP)},
        parts=MTP_PARTS,
        word=MTP,
        own_notes=(DESCRIPTION if _stated(target.stated) <= 1 else f"{DESCRIPTION}: the first of several",),
    )


def own_draft(target: ModelFolder) -> tuple[ModelFolder, ModelFolder | None]:
    """Return the target, and its own layer as its draft where it has one; the target says what one cannot be read for.

    A config.json alone has what it states.
    """
    names = mtp_names(target.config.get_text_config(decoder=True))
    if names is None or is_gguf(target.folder):
        return target, None
    is_planned = all(entry.is_planned for entry in target.checkpoint.tensors.values())
    if not names.of_layer(target.checkpoint.tensors) and not (is_planned and _stated(target.stated)):
        return target, None
    try:
        return target, open_mtp(target)
    except (EdgespecError, OffloadError) as error:  # nobody has named it: the target runs without it
        return replace(target, own_notes=(*target.own_notes, f"{UNREAD}: {error.what.removesuffix('.')}")), None


def without_description(layer: ModelFolder) -> ModelFolder:
    """Return a layer's folder without the note that it is one, which another line says too."""
    return replace(layer, own_notes=tuple(note for note in layer.own_notes if note != DESCRIPTION))


def _checked_names(target: ModelFolder) -> MtpNames:
    names = mtp_names(target.config.get_text_config(decoder=True))
    if is_gguf(target.folder):
        raise _refusal(target, "is a GGUF file, of which multi-token-prediction layers are not read")
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
