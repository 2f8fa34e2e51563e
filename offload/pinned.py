"""Page-locked host memory, of exactly the size asked for.

torch's own pinned allocator rounds every buffer up to a power of two, which at the size of decoder
layers can double the memory that a plan promised. Here anonymous pages are mapped and then
registered with the driver.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from offload.device import Device, PinningError
from offload.pages import fresh_pages


class PinnedBuffer:
    """Holds page-locked memory: `bytes` is a uint8 tensor that a device copies from at full speed, asynchronously.

    Raises PinningError where the driver or the system's limit on locked memory refuses.
    """

    def __init__(self, num_bytes: int, *, device: Device) -> None:
        # A failed mapping is an OSError: the address space or the commit limit is exhausted.
        try:
            self.bytes: Tensor = fresh_pages(num_bytes)
        except OSError as error:
            raise PinningError(str(error)) from error
        device.lock(self.bytes)
        # Also when construction further up fails: pages must not be unmapped while they are registered.
        self._release = weakref.finalize(self, device.unlock, self.bytes)

    def close(self) -> None:
        """Unlock the pages; nothing may be copying from them any more."""
        self._release()
