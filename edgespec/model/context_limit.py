"""The longest text of a model: its positions, times the factor of a scaled rotation.

transformers has no such limit, and uses the fields for frequencies only: where a folder has a scaled rotation, and
`max_position_embeddings` is still the unscaled length, the limit is that length times the factor.
"""

from typing import Any

from transformers import PretrainedConfig

STRETCHED = {"yarn", "linear", "dynamic", "longrope"}  # not llama3, whose positions are scaled already


def context_of(text_config: PretrainedConfig) -> int | None:
    """Return the number of tokens that fit the model's positions; None where the family sets no limit."""
    limit = getattr(text_config, "max_position_embeddings", None)
    if not limit:
        return None
    rope = getattr(text_config, "rope_parameters", None) or {}
    # A family with a set for each kind of layer states scaled positions, unless a set has its unscaled length.
    parts = [part for part in rope.values() if isinstance(part, dict)]
    stretched = [_stretched(part, None) for part in parts] if parts else [_stretched(rope, limit)]
    return max(int(limit), *stretched)


def _stretched(rope: dict[str, Any], unscaled: int | None) -> int:
    """Return the unscaled length times the factor; 0 where one of them is unknown."""
    original, factor = rope.get("original_max_position_embeddings") or unscaled, rope.get("factor") or 1
    if not isinstance(original, int) or not isinstance(factor, int | float):
        return 0
    return int(original * factor) if str(rope.get("rope_type")) in STRETCHED else 0
