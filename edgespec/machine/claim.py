"""A CUDA device is claimed for a pair: its allocator, its attention, and the thread's current device."""

from collections.abc import Callable

import torch

from edgespec.machine.environment import GROWING_SEGMENTS, segments_may_grow, set_allocator_variable, spills_in_silence


def claim_device(device: torch.device, *, limit_bytes: int | None, planned_bytes: int) -> Callable[[], None]:
    """Set CUDA up for trees; return the function that undoes it, to be called after the weights are freed.

    Allocations beyond `limit_bytes` fail like those of full memory; where the driver would spill into system memory,
    so do those beyond `planned_bytes`. Nothing happens on a CPU.
    """
    if device.type != "cuda":
        return lambda: None
    before = torch.cuda.current_device()
    torch.cuda.set_device(device)  # or what names no device makes a context on another one
    if segments_may_grow():
        # Caches and masks grow step by step: fixed blocks would fragment the memory.
        set_allocator_variable()
        _set_allocator(GROWING_SEGMENTS)
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    # It makes a plan for each number of keys, 50 ms and more, and our number changes at each step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    most_bytes = planned_bytes if limit_bytes is None and spills_in_silence() else limit_bytes
    if most_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, most_bytes) / total_bytes), device)

    def release() -> None:
        torch.backends.cuda.enable_cudnn_sdp(had_cudnn)
        if most_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()  # so that the next model can have the blocks
        torch.cuda.set_device(before)

    return release


def _set_allocator(settings: str) -> None:
    """Change the allocator's settings, by the call that this torch has."""
    call = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    call(settings)
