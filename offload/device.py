"""The interface of a device to streaming: streams that work in order, events between them, copies, locked host memory.

`CudaDevice` is the real one. Tests have one whose streams advance in any order that a real device may choose.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


class PinningError(RuntimeError):
    """Raised when the system refuses to lock that much memory."""


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; it may be let go at once, and must not be changed.

    CUDA copies from locked memory on its own. From other memory the host waits until all work before the copy is done.
    """
    if device.type != "cuda" or host.device.type != "cpu":
        return host.to(device)
    # The allocator of locked memory knows of the copy, and reuses the memory after its end only.
    return host.pin_memory().to(device, non_blocking=True)


class DeviceEvent(Protocol):
    """A mark in the work of a stream."""

    def record(self, stream: Any) -> None:
        """Set the mark after the work that the stream was given so far."""

    def synchronize(self) -> None:
        """Return when the work before the mark is done."""

    def query(self) -> bool:
        """Return whether the work before the mark is done."""


class DeviceStream(Protocol):
    """Work that a device does in order, beside that of other streams. `Any` stands for the same device's own types."""

    def wait_event(self, event: Any) -> None:
        """Let work that is given from now on begin after the event's mark. The host goes on at once."""

    def wait_stream(self, stream: Any) -> None:
        """Let work that is given from now on begin after the work that the other stream was given so far."""

    def synchronize(self) -> None:
        """Return when all work is done."""


class Device(Protocol):
    """A device with memory of its own."""

    @property
    def torch_device(self) -> torch.device:
        """Return what torch calls it."""

    def empty(self, num_bytes: int) -> Tensor:
        """Return uint8 memory of the device; work that the current stream was given so far may still be using it."""

    def new_stream(self) -> DeviceStream:
        """Return a stream that waits for no other."""

    def current_stream(self) -> DeviceStream:
        """Return the stream that the calling thread computes on."""

    def new_event(self, *, blocking: bool = False) -> DeviceEvent:
        """Return an event that is done until it is recorded; `blocking` lets a thread that waits for it sleep."""

    def copy(self, source: Tensor, destination: Tensor, stream: Any) -> None:
        """Give the stream a copy from the host; it reads locked memory later, other memory before this returns."""

    def copy_back(self, source: Tensor, destination: Tensor) -> None:
        """Give the current stream a copy to the host; locked memory has it once the stream has come so far."""

    def lock(self, memory: Tensor) -> None:
        """Lock a host tensor's pages, so that copies from them are fast and asynchronous; raises PinningError."""

    def unlock(self, memory: Tensor) -> None:
        """Unlock a host tensor's pages; no copy may be reading them any more."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device, by way of torch."""

    torch_device: torch.device

    def empty(self, num_bytes: int) -> Tensor:
        """Return memory of torch's allocator, which reuses freed memory at once."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def new_stream(self) -> DeviceStream:
        """Return a stream beside the default one."""
        return torch.cuda.Stream(self.torch_device)

    def current_stream(self) -> DeviceStream:
        """Return the stream that torch computes on."""
        return torch.cuda.current_stream(self.torch_device)

    def new_event(self, *, blocking: bool = False) -> DeviceEvent:
        """Return an event without a time stamp."""
        return torch.cuda.Event(blocking=blocking)

    def copy(self, source: Tensor, destination: Tensor, stream: Any) -> None:
        """Give the stream a copy."""
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def copy_back(self, source: Tensor, destination: Tensor) -> None:
        """Give torch's current stream a copy."""
        destination.copy_(source, non_blocking=True)

    def lock(self, memory: Tensor) -> None:
        """Lock a host tensor's pages for the driver."""
        with torch.cuda.device(self.torch_device):  # the call makes a context on the current device
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
        if code == 0:
            return
        with contextlib.suppress(RuntimeError):
            # The driver reports a failed call once more to the next call: let that be this line.
            torch.zeros(1, device=self.torch_device)
        raise PinningError(f"cudaHostRegister of {memory.nbytes >> 20} MiB failed with code {code}")

    def unlock(self, memory: Tensor) -> None:
        """Unlock a registered tensor's pages."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def has_grouped_products(device: torch.device) -> bool:
    """Return whether a device multiplies rows with many experts in one call: Hopper and later."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)
