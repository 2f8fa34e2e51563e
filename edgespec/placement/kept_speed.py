"""The speeds of this machine that were measured here before, in the form of a data sheet.

Without them a card has its data sheet's, and a CPU those of a common one.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
from pydantic import Field

from edgespec.errors import EdgespecError
from edgespec.machine.device import most_threads
from edgespec.placement.run_config import RunConfig
from edgespec.user_paths import cache_folder, machine_file, make_folder, written_whole
from edgespec.validation import parse_json, read_as
from profiles.errors import ProfileError
from profiles.hardware import Assumptions, Hardware, KernelRates, read_assumptions, read_hardware
from profiles.measure import machine_facts

SCHEMA = "edgespec.machine/5"
COMMON_CARD = "rtx-4070"  # where a card is not known by its name: no ratio of its rates is far from those of others

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
    if device.type == "cuda" and not torch.cuda.is_available():
        return None  # a card that is only planned for
    try:
        content = parse_json(machine_file().read_text(encoding="utf-8"))
        found = read_as(MachineSpeed, content, lambda key, wrong: EdgespecError("E_SETTING", f"{key} {wrong}", ""))
    except (OSError, ValueError, EdgespecError):
        return None
    now = (SCHEMA, device_name(device), torch.get_num_threads())
    return found if (found.schema, found.device_name, found.threads) == now else None


def keep_speed(speed: MachineSpeed) -> None:
    """Write what was measured to the user's folder; raises OSError."""
    path = machine_file()
    make_folder(path.parent)
    with written_whole(path, is_private=False) as partial:
        partial.write_text(json.dumps(asdict(speed), indent=1) + "\n", encoding="utf-8")


def hardware_here(device: torch.device, files: list[Path]) -> tuple[Hardware, Assumptions]:
    """Return this machine's speeds, and what is assumed beside them, for a model in these files.

    They are those that were measured here; without such, of the card's data sheet, or of a common card or CPU.
    """
    assumptions, kept = read_assumptions(), kept_speed(device)
    if kept is not None:
        disk_bytes_per_s = kept.disks.get(disk_of(files), assumptions.host_disk_bytes_per_s)
        return kept.hardware(device), assumptions.of_measured(disk_bytes_per_s)
    if device.type == "cpu":
        return read_hardware("cpu"), assumptions
    try:
        name = device_name(device) if torch.cuda.is_available() else COMMON_CARD
        return read_hardware(name), assumptions
    except ProfileError:
        return read_hardware(COMMON_CARD), assumptions


def disk_of(files: list[Path]) -> str:
    """Return the mount point of the disk that `measure_disk` measures."""
    path = (files[0] if files else cache_place()).resolve()
    return str(
        next(parent for parent in (path, *path.parents) if os.path.ismount(parent) or parent == Path(path.anchor))
    )


def cache_place() -> Path:
    """Return the folder of the cache, or what there is above it."""
    return next(path for path in (cache_folder(), *cache_folder().parents) if path.exists())


def device_name(device: torch.device) -> str:
    """Return what a machine's speeds are kept by: the card, or the processor and its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    facts = machine_facts(device)
    return f"{facts.processor}, {facts.num_cores} cores"


def growth_place(run_config: RunConfig) -> str:
    """Return what the seconds of a draft's trees depend on beside the draft, for a device that is here."""
    device, threads = run_config.device, most_threads(run_config.threads, run_config.device)
    formats = f"{run_config.dtype}, {run_config.quant}, {run_config.draft_quant}"
    return f"{device_name(device)}, {threads} threads, {formats}, recorded: {run_config.records_passes}"
