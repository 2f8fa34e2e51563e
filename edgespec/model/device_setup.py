"""CUDA set up for trees while a pair is on the device, and left as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch


def set_up_device(device: torch.device, *, most_bytes: int | None) -> Callable[[], None]:
    """Set torch up for trees on this device; return what undoes it, to be called when the weights are gone.

    Allocations beyond `most_bytes` fail, as where memory runs out. cuDNN's attention is left out: it makes a plan for
    every number of keys, 50 ms and more each, and ours have another number at every step. Nothing happens on a CPU.
    """
    if device.type != "cuda":
        return lambda: None
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    if most_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, most_bytes) / total_bytes), device)

    def release() -> None:
        torch.backends.cuda.enable_cudnn_sdp(had_cudnn)
        if most_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()  # the blocks would be missing to whoever comes next

    return release
