"""Page-locked host memory, of exactly the size asked for.

torch's own pinned allocator rounds every buffer up to a power of two, which at the size of decoder
layers can double the memory that a plan promised. Here anonymous pages are mapped and then
registered with the driver.
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
import weakref

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


class PinningError(RuntimeError):
    """Raised when the system refuses to lock that much memory."""


class PinnedBuffer:
    """Holds page-locked memory: `bytes` is a uint8 tensor that a device copies from at full speed, asynchronously.

    Raises PinningError where the driver or the system's limit on locked memory refuses.
    """

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        # A failed mapping is an OSError: the address space or the commit limit is exhausted.
        try:
            self._mapping = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise PinningError(str(error)) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.bytes: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        register(self.bytes, device)
        # Also when construction further up fails: pages must not be unmapped while they are registered.
        self._release = weakref.finalize(self, unregister, self.bytes)

    def close(self) -> None:
        """Unlock the pages; nothing may be copying from them any more."""
        self._release()


def register(data: Tensor, device: torch.device) -> None:
    """Lock a host tensor's pages for the driver; raises PinningError."""
    with torch.cuda.device(device):  # the call makes a context on the current device
        code = int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, PORTABLE))
    if code == 0:
        return
    with contextlib.suppress(RuntimeError):
        # The driver reports a failed call once more to whoever looks next: let that be this line.
        torch.zeros(1, device=device)
    raise PinningError(f"cudaHostRegister of {data.nbytes >> 20} MiB failed with code {code}")


def unregister(data: Tensor) -> None:
    """Unlock a registered tensor's pages."""
    torch.cuda.cudart().cudaHostUnregister(data.data_ptr())
