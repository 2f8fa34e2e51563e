"""The machine that runs this, as `edgespec estimate` sees it: measured once, and kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.cli.console import Console
from edgespec.user_paths import machine_file, shown_place

if TYPE_CHECKING:
    import torch

    from edgespec.pair.folder import ModelFolder
    from edgespec.placement.kept_speed import MachineSpeed
    from profiles.hardware import Assumptions, Hardware


def is_here(device: torch.device) -> bool:
    """Return whether there is such a device, or it is only planned for."""
    import torch

    return device.type == "cpu" or torch.cuda.is_available()


def measured_here(device: torch.device, target: ModelFolder, *, again: bool) -> tuple[Hardware, Assumptions]:
    """Return this machine's speeds and the assumptions beside them; unknown speeds are measured and kept."""
    from edgespec.doctor.machine_speed import MAX_BUSY, measure_disk
    from edgespec.placement.kept_speed import disk_of, keep_speed, kept_speed
    from profiles.hardware import read_assumptions

    assumptions = read_assumptions()
    files = target.checkpoint.files
    known = None if again else kept_speed(device)
    disk = disk_of(files)
    if known is not None and disk in known.disks:
        return known.hardware(device), assumptions.of_measured(known.disks[disk])
    parts = "the disk" if known is not None else "memory, arithmetic and disk of this machine"
    console = Console(quiet=False, verbose=False)
    console.say(
        f"measuring {parts}, once: about {1 if known is not None else 4} s (kept in {shown_place(machine_file())})"
    )
    speed, busy = _measured_beside_others(device) if known is None else (known, 0.0)
    try:
        measured_disk, found = measure_disk(files)
        speed = replace(speed, disks={**speed.disks, measured_disk: found.bytes_per_s})
        if busy < MAX_BUSY:
            keep_speed(speed)
        else:
            console.say(
                f"not kept: other programs kept {busy:.1f} processors busy, so this machine is faster than estimated; "
                "estimate again when those have ended"
            )
    except OSError as error:
        console.say(f"not kept: {error.strerror} ({error.filename or disk})")
    disk_bytes_per_s = speed.disks.get(disk, assumptions.host_disk_bytes_per_s)
    return speed.hardware(device), assumptions.of_measured(disk_bytes_per_s)


def _measured_beside_others(device: torch.device) -> tuple[MachineSpeed, float]:
    """Return the machine's speed, and how many processors other programs kept busy meanwhile."""
    from edgespec.doctor.machine_speed import measure_speed
    from edgespec.machine.cpu import read_cpu
    from edgespec.tuning.threads import OthersLoad

    others = OthersLoad(read_cpu().allowed)
    return measure_speed(device), others() or 0.0
