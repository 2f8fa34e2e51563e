"""Models are built without drawing values for weights that will be read."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class NoInitialValues(TorchFunctionMode):
    """Leaves tensors without memory as they are: drawing values for them draws none, and takes time all the same."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if getattr(function, "__name__", "") in _DRAWING:
            tensor = arguments[0] if arguments else named["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*arguments, **named)


_DRAWING = {"normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "kaiming_uniform_", "kaiming_normal_"}
