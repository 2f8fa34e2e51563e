"""What libraries read from the environment when they are imported, for processes that are edgespec's own."""

from __future__ import annotations

import os
import sys


def set_up_environment() -> None:
    """Keep libraries from the network, from talking, and CUDA's memory from falling to pieces; before any import."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if sys.platform != "win32" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Caches and masks that grow step by step leave no blocks behind that fit nothing.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
