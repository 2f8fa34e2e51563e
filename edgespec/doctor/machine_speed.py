"""The speeds of this machine that estimates need: memory, arithmetic, link and disk, measured in a second or two.

They are kept in the user's folder until the machine changes, or the user measures again. Memory is measured as
decoding uses it: by products of a large layer and one row, in both kinds of numbers, which CPUs read unequally fast.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
from pydantic import Field

from edgespec.doctor.disk_speed import DiskSpeed, read_speed, scratch_speed
from edgespec.errors import EdgespecError
from edgespec.files import cache_folder, machine_file, make_folder, written_whole
from edgespec.inputs import parse_json, read_as
from offload.formats.known import KEEPERS, PACKERS
from offload.formats.packed_format import Keeper
from offload.linear import layer_product
from profiles.hardware import Hardware, KernelRates
from profiles.measure import copy_bytes_per_s, machine_facts

SCHEMA = "edgespec.machine/5"
MATRIX = {"cpu": (4096, 16384), "cuda": (8192, 16384)}  # read once: larger than any cache
PRODUCT = {"cpu": 768, "cuda": 4096}  # rows, columns and depth of a square product
PACKED = (1024, 4096)  # of a packed weight
UNCACHED_BYTES = 256 << 20  # of copies, which are read in turn: larger than nearly all caches
MANY_ROWS = 16  # of a small tree
BUDGET_S = 0.3  # of each measurement
MIN_RUNS, MAX_RUNS = 3, 25
MAX_BUSY = 0.3  # processors that other programs keep busy while measuring: beside more, all that is measured is slow

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """What was measured here, and when."""

    schema: str
    device_name: str  # what it was measured on: others, and another number of threads, measure again
    threads: int
    created: str
    memory_bytes_per_s: Rate
    half_memory_bytes_per_s: Rate  # of weights in bf16
    half_flops_per_s: Rate
    float32_flops_per_s: Rate
    # Packed format -> weights a second that a kernel multiplies in bf16: of one row, and of each of many
    kernels: dict[str, tuple[Rate, Rate]]
    link_bytes_per_s: Rate | None  # from locked RAM to the device; None where there is none
    disks: dict[str, Rate]  # mount point -> bytes a second

    def hardware(self, device: torch.device) -> Hardware:
        """Return the machine in the form of a data sheet."""
        is_cuda = device.type == "cuda"
        total = torch.cuda.mem_get_info(device)[1] if is_cuda else psutil.virtual_memory().total
        link = f"copies of {self.link_bytes_per_s / 1e9:.1f} GB/s" if self.link_bytes_per_s else ""
        return Hardware(
            name="this machine",
            title=self.device_name,
            device=device.type,
            memory_bytes=total,
            memory_bytes_per_s=self.memory_bytes_per_s,
            half_memory_bytes_per_s=self.half_memory_bytes_per_s,
            half_flops_per_s=self.half_flops_per_s,
            float32_flops_per_s=self.float32_flops_per_s,
            link_bytes_per_s=self.link_bytes_per_s or math.inf,
            kernels={name: KernelRates(one_row=one, each_row=each) for name, (one, each) in self.kernels.items()},
            link=link,
            sources={"all": f"measured {self.created}"},
        )


def kept_speed(device: torch.device) -> MachineSpeed | None:
    """Return what was measured of this machine before; None where nothing fits it as it is now."""
    try:
        content = parse_json(machine_file().read_text(encoding="utf-8"))
        found = read_as(MachineSpeed, content, lambda key, wrong: EdgespecError("E_SETTING", f"{key} {wrong}", ""))
    except (OSError, ValueError, EdgespecError):
        return None
    now = (SCHEMA, _device_name(device), torch.get_num_threads())
    return found if (found.schema, found.device_name, found.threads) == now else None


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
    return MachineSpeed(
        schema=SCHEMA,
        device_name=_device_name(device),
        threads=torch.get_num_threads(),
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        memory_bytes_per_s=max(bytes_per_s.values()),
        half_memory_bytes_per_s=bytes_per_s[torch.bfloat16],
        half_flops_per_s=flops_per_s[torch.bfloat16],
        float32_flops_per_s=flops_per_s[torch.float32],
        kernels={keeper.name: found for keeper in KEEPERS if (found := _kernel_rates(keeper, device)) is not None},
        link_bytes_per_s=copy_bytes_per_s(device, pinned=True) if device.type == "cuda" else None,
        disks={},
    )


def _kernel_rates(keeper: Keeper, device: torch.device) -> tuple[float, float] | None:
    """Measure the kernel of a packed format: weights a second of one row, and of each of many; None without one."""
    kernel = keeper.kernel(PACKED, torch.bfloat16, device)
    if kernel is None:
        return None
    packer = next((packer for packer in PACKERS if packer == keeper), None)
    if packer is None:
        layouts = keeper.part_shapes(PACKED)
        parts = {name: torch.ones(shape, dtype=dtype, device=device) for name, (shape, dtype) in layouts.items()}
    else:
        packing, parts = packer.pack(torch.randn(PACKED, dtype=torch.bfloat16, device=device))
        kernel = packing.kernel(PACKED, torch.bfloat16, device)
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
    return place, read_speed(files) if files else scratch_speed(_cache_place())


def disk_of(files: list[Path]) -> str:
    """Return the mount point of the disk that `measure_disk` measures."""
    path = (files[0] if files else _cache_place()).resolve()
    return str(
        next(parent for parent in (path, *path.parents) if os.path.ismount(parent) or parent == Path(path.anchor))
    )


def keep_speed(speed: MachineSpeed) -> None:
    """Write what was measured to the user's folder; raises OSError."""
    path = machine_file()
    make_folder(path.parent)
    with written_whole(path, is_private=False) as partial:
        partial.write_text(json.dumps(asdict(speed), indent=1) + "\n", encoding="utf-8")


def _cache_place() -> Path:
    return next(path for path in (cache_folder(), *cache_folder().parents) if path.exists())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    facts = machine_facts(device)
    return f"{facts.processor}, {facts.num_cores} cores"


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
