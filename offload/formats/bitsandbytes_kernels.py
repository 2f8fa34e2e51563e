"""bitsandbytes' functional kernels, imported without a look at the network.

On some processors bitsandbytes asks a hub for a faster kernel while it is imported, if a package
named `kernels` is installed, and warns if it is not. Neither is wanted here.
"""

from __future__ import annotations

import functools
import logging
import sys
from types import ModuleType


@functools.cache
def bitsandbytes_functional() -> ModuleType:
    """Return the module bitsandbytes.functional."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, kernels = logger.level, sys.modules.get("kernels")
    logger.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # makes `import kernels` fail
    try:
        from bitsandbytes import functional
    finally:
        logger.setLevel(level)
        if kernels is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = kernels
    module: ModuleType = functional
    return module
