"""A target's own low-bit copy is opened as its draft: the target's files again, whose layers are packed in few bits.

Layers that the target keeps in memory anyway are shared with it (`placement/copied_layers.py`), and so is all outside
the layers. The others are kept in memory as the quantised cache has them. SubSpec (arXiv 2509.18344) drafts so.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.draft.own_parts import OwnParts
from edgespec.hub.names import SELF
from edgespec.pair.folder import ModelFolder


def open_self_copy(target: ModelFolder, word: Path) -> ModelFolder:
    """Return a target's copy as its draft, whose layers are packed as its name says."""
    return ModelFolder(
        folder=target.folder,
        config=target.config,
        checkpoint=target.checkpoint,
        generation_config={},
        stated={**target.stated, "edgespec_draft": "self"},
        parts=OwnParts(attach=lambda _model: None, modules=(), copied_as=SELF[word]),
        word=word,
    )
