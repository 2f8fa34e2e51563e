"""The speeds of this machine that estimates need: memory, arithmetic, link and disk, measured in a second or two.

They are kept in the user's folder (`placement/kept_speed.py`) until the machine changes, or the user measures again.
Memory is measured as decoding uses it: by products of a large layer and one row, in both kinds of numbers, which CPUs
read unequally fast.
"""

import datetime
import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from edgespec.doctor.disk_speed import DiskSpeed, read_speed, scratch_speed
from edgespec.placement.kept_speed import SCHEMA, MachineSpeed, cache_place, device_name, disk_of
from offload.formats.storage import PackedStorage
from offload.layouts.known import LAYOUTS, QUANTIZERS, kernel_of
from offload.layouts.onednn import layer_product
from profiles.measure import copy_bytes_per_s

MATRIX = {"cpu": (4096, 16384), "cuda": (8192, 16384)}  # read once: larger than any cache
PRODUCT = {"cpu": 768, "cuda": 4096}  # rows, columns and depth of a square product
PACKED = (1024, 4096)  # of a packed weight
UNCACHED_BYTES = 256 << 20  # of copies, which are read in turn: larger than nearly all caches
MANY_ROWS = 16  # of a small tree
BUDGET_S = 0.3  # of each measurement
MIN_RUNS, MAX_RUNS = 3, 25
MAX_BUSY = 0.3  # processors that other programs keep busy while measuring: beside more, all that is measured is slow


def measure_speed(device: torch.device) -> MachineSpeed:
    """Measure memory, arithmetic and link."""
    rows, columns = MATRIX[device.type]
    size = PRODUCT[device.type]
    bytes_per_s, flops_per_s = {}, {}
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.ones(rows, columns, dtype=dtype, device=device)
        row = torch.ones(1, columns, dtype=dtype, device=device)
        product = layer_product(matrix, is_resident=True)
        bytes_per_s[dtype] = matrix.nbytes / _median_s(functools.partial(product, row), device)
        del matrix, product
        square = torch.ones(size, size, dtype=dtype, device=device)
        product = layer_product(square, is_resident=True)
        flops_per_s[dtype] = 2 * size**3 / _median_s(functools.partial(product, square), device)
    owns = [layout.own for layout in LAYOUTS]
    return MachineSpeed(
        schema=SCHEMA,
        device_name=device_name(device),
        threads=torch.get_num_threads(),
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        memory_bytes_per_s=max(bytes_per_s.values()),
        half_memory_bytes_per_s=bytes_per_s[torch.bfloat16],
        half_flops_per_s=flops_per_s[torch.bfloat16],
        float32_flops_per_s=flops_per_s[torch.float32],
        kernels={own.name: found for own in owns if (found := _kernel_rates(own, device)) is not None},
        link_bytes_per_s=copy_bytes_per_s(device, pinned=True) if device.type == "cuda" else None,
        disks={},
    )


def _kernel_rates(own: PackedStorage, device: torch.device) -> tuple[float, float] | None:
    """Measure the kernel of a layout: weights a second of one row, and of each of many; None without one."""
    kernel = kernel_of(own, PACKED, torch.bfloat16, device)
    if kernel is None:
        return None
    packer = next((packer for packer in QUANTIZERS if packer == own), None)
    if packer is None:
        shapes = own.part_shapes(PACKED).items()
        parts = {name: torch.ones(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes}
    else:
        own, parts = packer.pack(torch.randn(PACKED, dtype=torch.bfloat16, device=device))
        kernel = kernel_of(own, PACKED, torch.bfloat16, device)
    assert kernel is not None
    multiply = kernel.multiply
    num_copies = math.ceil(UNCACHED_BYTES / sum(part.nbytes for part in parts.values()))
    copies = [{name: part.clone() for name, part in parts.items()} for _ in range(num_copies)]
    num_weights = num_copies * math.prod(PACKED)

    def weights_per_s(num_rows: int) -> float:
        rows = torch.ones(num_rows, PACKED[1], dtype=torch.bfloat16, device=device)
        return num_rows * num_weights / _median_s(lambda: [multiply(copy, rows, None) for copy in copies], device)

    return weights_per_s(1), weights_per_s(min(MANY_ROWS, kernel.max_rows))


def measure_disk(files: list[Path]) -> tuple[str, DiskSpeed]:
    """Measure the disk of a model's files, or of the cache where there are none; raises OSError.

    Returns its mount point too.
    """
    place = disk_of(files)
    return place, read_speed(files) if files else scratch_speed(cache_place())


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of some runs; the first one, which warms up, is not counted."""
    seconds: list[float] = []
    started = time.perf_counter()
    for number in range(1 + MAX_RUNS):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        if number:
            seconds.append(ended - begun)
        if len(seconds) >= MIN_RUNS and ended - started > BUDGET_S:
            break
    return statistics.median(seconds)
