"""A draft's folder: which kind it has, and how that is opened. This is the one door for drafts of any kind.

Its config.json and its tensors' headers are looked at, and no weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from edgespec.draft.draft_kind import NAMES, DraftKind, Name, check_is_read, kind_of
from edgespec.draft.own_parts import OwnParts
from edgespec.errors import EdgespecError, offload_errors
from edgespec.hub.names import MTP, NO_DRAFT, SELF
from edgespec.pair.choices import DraftChoice, each_draft
from edgespec.pair.folder import ModelFolder, open_architecture, open_head, open_model, read_head_facts, read_json
from edgespec.pair.mtp import open_mtp, own_draft
from edgespec.pair.published_kinds import PUBLISHED, open_published
from edgespec.pair.tree_support import tree_support
from offload.checkpoint import Checkpoint, read_checkpoint
from offload.errors import OffloadError
from offload.gguf.checkpoint import gguf_checkpoint
from offload.gguf.files import is_gguf
from offload.gguf.header import GgufHeader, read_gguf
from offload.gguf.kinds import is_further_layer
from offload.gguf.settings import config_fields
from offload.torch_file import TORCH_NAME, read_torch_file

BY_ARCHITECTURE: dict[str, Name] = {"eagle3": "eagle3", "gemma4-assistant": "assistant"}  # of GGUF files


def read_kind(folder: Path) -> DraftKind:
    """Return what a draft's folder or GGUF file holds; raises EdgespecError for a kind that cannot be read."""
    if is_gguf(folder):
        with offload_errors():
            return _kind_of_file(read_gguf(folder, is_whole=False))
    names: frozenset[str] = frozenset()
    with contextlib.suppress(OffloadError):  # what is wrong with files is said where they are opened
        names = frozenset(read_draft_checkpoint(folder).tensors)
    return kind_of(read_json(folder / "config.json"), names, named=str(folder))


def _kind_of_file(header: GgufHeader) -> DraftKind:
    if is_further_layer(header):
        return DraftKind(name="mtp", container="file")
    if header.architecture in BY_ARCHITECTURE:
        return DraftKind(name=BY_ARCHITECTURE[header.architecture])
    if header.architecture != "dflash":
        return DraftKind(name="model")
    has_selector = header.has_tensor("selector_hidden.weight")
    return DraftKind(
        name="dflash2" if has_selector else "dspark" if header.has_tensor("markov_w1.weight") else "dflash"
    )


def check_is_target(folder: Path) -> None:
    """Raise EdgespecError for a folder whose config.json says that it is a draft, which needs a target."""
    try:
        kind = (
            read_kind(folder) if is_gguf(folder) else kind_of(read_json(folder / "config.json"), (), named=str(folder))
        )
    except EdgespecError:  # of a kind that is not read: opening it says why
        return
    if kind.name == "model":
        return
    of = (
        f"a feature head of '{read_head_facts(folder).target}'"
        if kind.name == "head"
        else f"{NAMES[kind.name]} of a target"
    )
    what = f"'{folder}' is {of}: it drafts for it, and is no target."
    raise EdgespecError("E_HEAD_ALONE", what, "Name the target with `target` and the head with `draft`.")


def planned_draft(folder: Path | None, target: ModelFolder) -> tuple[ModelFolder, ModelFolder | None]:
    """Return the target and its draft, as `open_pair` has them; either may hold a config.json alone.

    A target that gives no hidden states is left without a layer of its own, which would read them. Raises EdgespecError
    as `open_draft` does.
    """
    if folder is None:
        target, layer = own_draft(target)
        return target, None if layer is None or tree_support(target).has_own_passes else layer
    return target, None if folder == NO_DRAFT else open_draft(folder, target, is_planned=True)


def planned_drafts(names: Sequence[Path], target: ModelFolder) -> tuple[DraftChoice, ...]:
    """Return the drafts of a list, as `planned_draft` does; `auto` stands for those at hand."""
    return tuple(DraftChoice(model=planned_draft(name, target)[1]) for name in each_draft(names, target))


def open_draft(folder: Path, target: ModelFolder, *, is_planned: bool = False) -> ModelFolder:
    """Read and check a draft of any kind; raises EdgespecError where it is none of the target's.

    One that `is_planned` may hold a config.json alone.
    """
    if folder == MTP:
        return open_mtp(target)
    if folder in SELF:
        return open_self_copy(target, folder)
    kind = read_kind(folder)
    check_is_read(kind, named=str(folder))
    if kind.name == "head":
        return open_head(folder, target)
    if kind.name == "mtp":
        return open_mtp(target, folder)
    if kind.name in PUBLISHED:
        return open_published(folder, target, kind, read_draft_tensors(folder, is_planned=is_planned))
    return open_architecture(folder) if is_planned else open_model(folder)


def read_draft_tensors(folder: Path, *, is_planned: bool = False) -> Checkpoint:
    """Return a published draft's tensors: none where it is planned from a config.json alone.

    Of a GGUF file that is planned the header may be there alone.
    """
    with offload_errors():
        if is_gguf(folder):
            return read_draft_checkpoint(folder, is_whole=not is_planned)
        if is_planned and not any(folder.glob("*.safetensors*")) and not (folder / TORCH_NAME).exists():
            return Checkpoint(folder=folder, tensors={})
        return read_draft_checkpoint(folder)


def read_draft_checkpoint(folder: Path, *, is_whole: bool = True) -> Checkpoint:
    """Return the tensors of a published draft, also of torch's own file or a GGUF file; raises CheckpointError."""
    if is_gguf(folder):
        header = read_gguf(folder, is_whole=is_whole)
        return gguf_checkpoint(header, config_fields(header))
    if any(folder.glob("*.safetensors*")) or not (folder / TORCH_NAME).exists():
        return read_checkpoint(folder)
    return Checkpoint(folder=folder, tensors=read_torch_file(folder / TORCH_NAME))


def open_self_copy(target: ModelFolder, word: Path) -> ModelFolder:
    """Return a target's copy as its draft: its files again, whose layers are packed in few bits as its name says.

    Layers that the target keeps in memory anyway are shared with it (`placement/copied_layers.py`), and so is all
    outside the layers. The others are kept in memory as the quantised cache has them. SubSpec (2509.18344) drafts so.
    """
    return ModelFolder(
        folder=target.folder,
        config=target.config,
        checkpoint=target.checkpoint,
        generation_config={},
        stated={**target.stated, "edgespec_draft": "self"},
        parts=OwnParts(attach=lambda _model: None, modules=(), copied_as=SELF[word]),
        word=word,
    )
