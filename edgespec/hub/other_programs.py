"""Where other programs keep GGUF files: llama.cpp, LM Studio, Ollama. Nothing is ever written there."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

LM_STUDIO_DEPTH = 2  # PUBLISHER/MODEL/FILE.gguf
SYSTEM_OLLAMA = Path("/usr/share/ollama/.ollama/models")  # of a service


def llama_cpp_folder() -> Path | None:
    """Return llama.cpp's cache, by its own rules; None for a user without a home."""
    if os.environ.get("LLAMA_CACHE"):
        return Path(os.environ["LLAMA_CACHE"])
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base, "llama.cpp") if base else None
    home = home_folder()
    if sys.platform == "darwin":
        return home and home / "Library/Caches/llama.cpp"
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"], "llama.cpp")
    return home and home / ".cache/llama.cpp"


def lm_studio_folders() -> Iterator[Path]:
    """Yield LM Studio's folders of models: that of its settings, its own, and that of older versions."""
    home = home_folder()
    if home is None:
        return
    try:
        stated = json.loads((home / ".lmstudio/settings.json").read_text(encoding="utf-8")).get("downloadsFolder")
    except (OSError, ValueError, AttributeError):
        stated = None
    own = home / ".lmstudio/models"
    if isinstance(stated, str) and stated and Path(stated) != own:
        yield Path(stated)
    yield from (own, home / ".cache/lm-studio/models")


def ollama_folders() -> Iterator[Path]:
    """Yield Ollama's folders of models: the one that is set, the user's, and that of the system's service."""
    if os.environ.get("OLLAMA_MODELS"):
        yield Path(os.environ["OLLAMA_MODELS"])
    home = home_folder()
    if home is not None:
        yield home / ".ollama/models"
    if sys.platform.startswith("linux"):
        yield SYSTEM_OLLAMA


def program_folders() -> Iterator[tuple[str, Path, int]]:
    """Yield the folders that hold GGUF files by their names: program, folder, how many folders lie between."""
    found = llama_cpp_folder()
    if found is not None:
        yield "llama.cpp", found, 0
    yield from (("LM Studio", folder, LM_STUDIO_DEPTH) for folder in lm_studio_folders())


def home_folder() -> Path | None:
    """Return the user's home; None for nobody's."""
    try:
        return Path.home()
    except RuntimeError:  # nobody's
        return None
