"""What comes to a pretended card of keys and values that wait in RAM, and what goes back."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from edgespec.model.mechanisms.waiting_keys import NUM_PLACES
from offload.device_slots import DeviceSlots
from tests.support.pretend_cuda import PretendCudaDevice


@contextmanager
def moved_keys() -> Iterator[Counter[str]]:
    """Count the bytes that are "brought" and taken "back" within this block; what goes back is in one piece."""
    moved: Counter[str] = Counter()
    fill, copy_back = DeviceSlots.fill, PretendCudaDevice.copy_back

    def filled(self: DeviceSlots, slot: int, host: Tensor, *rest: Any, **at: int) -> None:
        moved["brought"] += host.nbytes * (len(self._slots) == NUM_PLACES and not rest and "at" in at)
        fill(self, slot, host, *rest, **at)

    def taken(self: PretendCudaDevice, source: Tensor, destination: Tensor) -> None:
        moved["back"] += source.nbytes
        assert source.is_contiguous()
        assert destination.is_contiguous()
        copy_back(self, source, destination)

    with patch.object(DeviceSlots, "fill", filled), patch.object(PretendCudaDevice, "copy_back", taken):
        yield moved
