"""Triton's interpreter, in which a card's kernels run on a CPU: what was imported to compile is imported again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

OF_KERNELS = "offload.formats.gguf_triton"


def interpreted_triton() -> Iterator[None]:
    """Let kernels be interpreted as long as a fixture lasts; skip its tests where Triton is not installed.

    Products of a scale's columns are rounded once: those of numpy differ by a row's place in a tile.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        for name in [name for name in sys.modules if name == OF_KERNELS or name.split(".")[0] == "triton"]:
            if not name.startswith("triton._C"):  # compiled itself, and loaded once
                patched.delitem(sys.modules, name)
        pytest.importorskip("triton", reason="Triton is not installed")
        interpreter = import_module("triton.runtime.interpreter")

        def dot(_self: object, a: Any, b: Any, before: Any, *_: object) -> Any:
            found = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32) + before.data
            return interpreter.TensorHandle(found, before.dtype.scalar)

        patched.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
        sys.modules.pop(OF_KERNELS, None)
