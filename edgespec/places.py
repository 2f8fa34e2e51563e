"""Where edgespec keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path, user_state_path


def cache_folder() -> Path:
    """For what can be made again: EDGESPEC_CACHE, or below EDGESPEC_HOME, or the system's place for caches."""
    if os.environ.get("EDGESPEC_CACHE"):
        return Path(os.environ["EDGESPEC_CACHE"])
    if os.environ.get("EDGESPEC_HOME"):
        return Path(os.environ["EDGESPEC_HOME"]) / "cache"
    return user_cache_path("edgespec", appauthor=False)


def profiles_folder() -> Path:
    """For measured profiles: below EDGESPEC_HOME, or the system's place for state."""
    if os.environ.get("EDGESPEC_HOME"):
        return Path(os.environ["EDGESPEC_HOME"]) / "profiles"
    return user_state_path("edgespec", appauthor=False) / "profiles"
