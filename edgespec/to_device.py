"""Numbers that the host decides on go to a device without a wait for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.device import to_device

__all__ = ["on_device", "to_device"]
Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[float]]


def on_device(numbers: Numbers, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return numbers as a tensor of the device."""
    return to_device(torch.tensor(numbers, dtype=dtype), device)
