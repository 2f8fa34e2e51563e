"""What a forward of transformers calls its cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# All families' from transformers 5.24 on; before it, that of Mamba's kind, and that of all others
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the argument that takes the cache."""
    takes = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in takes), CACHE_ARGUMENTS[-1])
