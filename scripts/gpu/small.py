"""The host does not wait for queued work before a small copy; milliseconds until it goes on."""

import time

import torch

from edgespec.to_device import on_device
from scripts.gpu.card import DEVICE, half_dtype
from scripts.gpu.finding import Finding, judged

SHAPE = (8192, 8192)


def check(*, is_full: bool) -> Finding:
    """Copy numbers behind a hundred products."""
    matrix = torch.randn(SHAPE, dtype=half_dtype(), device=DEVICE)
    numbers = list(range(64))
    matrix @ matrix  # the first makes a library's workspace
    on_device(numbers, DEVICE)  # the first takes locked memory
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        matrix @ matrix
    queued = time.perf_counter()
    found = on_device(numbers, DEVICE)
    copied = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    times = {"copy_ms": 1e3 * (copied - queued), "queued_work_ms": 1e3 * (done - start)}
    return judged(found.tolist() == numbers and copied - queued < (done - start) / 4, times, "the host waited")
