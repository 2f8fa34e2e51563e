"""Models are built without drawing values for weights that will be read, and without memory for the largest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LARGE_NUMBERS = 1 << 28  # of one tensor: systems may refuse its memory, even if nothing is written there


class NoInitialValues(TorchFunctionMode):
    """Leaves tensors without memory as they are: drawing values for them draws none, and takes time all the same.

    Weights are without memory from the start where they are so large that a system may refuse it.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is torch.empty and named.get("device") is None:
            sizes = arguments[0] if arguments and not isinstance(arguments[0], int) else arguments
            if math.prod(named.get("size", sizes)) >= LARGE_NUMBERS:
                named = {**named, "device": "meta"}
        if getattr(function, "__name__", "") in _DRAWING:
            tensor = arguments[0] if arguments else named["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*arguments, **named)


_DRAWING = {"normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "kaiming_uniform_", "kaiming_normal_"}
