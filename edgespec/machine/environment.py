"""The environment that libraries read at import, for edgespec's own processes, and what of it CUDA's memory follows."""

import os
import platform
import sys
from importlib.metadata import version

GROWING_SEGMENTS = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
FIRST_TO_HEED = (2, 11)  # torch: earlier ones let segments grow by the older variable alone (pytorch issue 183387)


def set_up_environment() -> None:
    """Turn off the network and messages of libraries, and let CUDA's blocks grow; to be called before any import."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    set_allocator_variable()


def set_allocator_variable() -> None:
    """Let CUDA's segments grow in a torch that does not do so when it is called."""
    if segments_may_grow() and tuple(map(int, version("torch").split(".")[:2])) < FIRST_TO_HEED:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = GROWING_SEGMENTS


def segments_may_grow() -> bool:
    """Return whether CUDA's segments can grow here, and the user has no settings for them.

    Windows has no such memory, and drivers under WSL fail to make it (pytorch issue 192330).
    """
    return not spills_in_silence() and not any(name in os.environ for name in ALLOCATOR_VARIABLES)


def locks_little() -> bool:
    """Return whether the system locks little memory for a card: under WSL."""
    return sys.platform == "linux" and spills_in_silence()


def spills_in_silence() -> bool:
    """Return whether the card's driver hands out system memory once its own is full: on Windows, and under WSL."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()
