"""edgespec: models too large for the card, run losslessly by verifying large token trees.

    from edgespec import Engine, SamplingSettings
    with Engine.from_pretrained("path/to/target", draft="path/to/draft") as engine:
        print(engine.generate("def main(", max_new_tokens=64).text)

Importing the package imports no torch; the names below load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from edgespec.chat.conversation import Conversation
    from edgespec.config import MemoryLimits, SamplingSettings
    from edgespec.engine import Engine
    from edgespec.errors import EdgespecError
    from edgespec.tree.settings import TreeSettings

_HOMES = {
    "Conversation": "edgespec.chat.conversation",
    "EdgespecError": "edgespec.errors",
    "Engine": "edgespec.engine",
    "GenerationConfig": "transformers",
    "MemoryLimits": "edgespec.config",
    "SamplingSettings": "edgespec.config",
    "TreeSettings": "edgespec.tree.settings",
}

__all__ = [
    "Conversation",
    "EdgespecError",
    "Engine",
    "GenerationConfig",
    "MemoryLimits",
    "SamplingSettings",
    "TreeSettings",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'edgespec' has no attribute '{name}'")
