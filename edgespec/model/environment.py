"""The environment that libraries read at import, for edgespec's own processes."""

from __future__ import annotations

import os
import sys


def set_up_environment() -> None:
    """Turn off the network and messages of libraries, and let CUDA's blocks grow; to be called before any import."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if sys.platform != "win32" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Caches and masks grow step by step: fixed blocks would fragment the memory.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
