"""How long a text may become for a model: its positions, and what a scaled rotation makes of them.

transformers has no such limit, and takes the fields for what they do to frequencies: where a folder asks for a scaled
rotation, and `max_position_embeddings` is still the length before it, the limit is that length times the factor.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

STRETCHED = {"yarn", "linear", "dynamic", "longrope"}  # and not llama3, whose positions count all of it


def context_of(text_config: PretrainedConfig) -> int | None:
    """Return the number of tokens that fit the model's positions; None where the family sets no limit."""
    limit = getattr(text_config, "max_position_embeddings", None)
    if not limit:
        return None
    rope = getattr(text_config, "rope_parameters", None) or {}
    # One set a kind of layer is written by a family, not by hand: its positions count all, unless it states a length.
    parts = [part for part in rope.values() if isinstance(part, dict)]
    stretched = [_stretched(part, None) for part in parts] if parts else [_stretched(rope, limit)]
    return max(int(limit), *stretched)


def _stretched(rope: dict[str, Any], unscaled: int | None) -> int:
    """Return the length before scaling times the factor, as far as both are known; 0 where they are not."""
    original, factor = rope.get("original_max_position_embeddings") or unscaled, rope.get("factor") or 1
    if not isinstance(original, int) or not isinstance(factor, int | float):
        return 0
    return int(original * factor) if str(rope.get("rope_type")) in STRETCHED else 0
