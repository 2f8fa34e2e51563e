"""Checks of whether this machine is fit to run, with torch: device, driver, locked memory, and profiles."""

import dataclasses
import shutil
from collections.abc import Iterator

import torch

from edgespec.doctor.checks import GIB, OK, WARN, Check
from edgespec.doctor.locked_memory import MOST_BYTES, try_locking
from edgespec.user_paths import profiles_folder
from offload.device import CudaDevice
from offload.layouts.int4_lanes import LANES
from offload.layouts.int4_orders import kernel_order
from offload.layouts.nf4_cpu import kernel_is_there
from offload.native.compiler import processor_name, why_unavailable
from profiles.errors import ProfileError
from profiles.files import all_profiles
from profiles.measure import machine_facts
from profiles.schema import MachineFacts


def check_machine() -> Iterator[Check]:
    """Check the device, kernels, locked memory and profiles."""
    facts = machine_facts()
    yield _device(facts)
    yield _kernels()
    yield _pinned()
    yield _profiles(facts)


def _device(facts: MachineFacts) -> Check:
    cpu = f"{facts.processor}, {facts.num_cores} cores"
    if facts.accelerator is not None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(0)
        major, minor = torch.cuda.get_device_capability(0)
        text = (
            f"{facts.accelerator} (compute capability {major}.{minor}), {free_bytes / GIB:.1f} of "
            f"{total_bytes / GIB:.1f} GiB free, driver {facts.driver or 'unknown'}, {facts.link or 'link unknown'}; "
            f"{cpu}"
        )
        found = {
            "device": facts.accelerator, "free_bytes": free_bytes, "total_bytes": total_bytes, "driver": facts.driver,
            "link": facts.link, "num_devices": torch.cuda.device_count(), "processor": facts.processor,
        }  # fmt: skip
        status = OK if free_bytes >= GIB else WARN
        return Check(name="device", status=status, text=text, facts=found)
    built_for = torch.version.cuda
    found = {"device": "cpu", "processor": facts.processor, "num_cores": facts.num_cores, "torch_cuda": built_for}
    if built_for is None and shutil.which("nvidia-smi"):
        text = f"there is an NVIDIA driver, but torch {torch.__version__} is built without CUDA; computing on {cpu}"
        return Check(name="device", status=WARN, text=text, facts=found)
    if built_for is not None:
        text = (
            f"torch is built for CUDA {built_for} and finds no device: the driver is missing, too old, or the "
            f"card is hidden (CUDA_VISIBLE_DEVICES); computing on {cpu}"
        )
        return Check(name="device", status=WARN, text=text, facts=found)
    return Check(name="device", status=OK, text=f"no CUDA; computing on {cpu}", facts=found)


def _kernels() -> Check:
    """Say which kernels multiply packed weights on the processor; where none of ours do, why, and what is done then."""
    why, order = why_unavailable(), kernel_order()
    if why is None and order != LANES:
        why = "their products of a sample are wrong here"
    text = f"packed weights are multiplied by kernels that are compiled for {processor_name()}"
    if why is not None:
        others = {"torch's (int4)": order is not None, "bitsandbytes' (nf4)": kernel_is_there()}
        by_others = " and ".join(name for name, is_there in others.items() if is_there)
        four_bits = f"multiplied by {by_others}" if by_others else "unpacked in each pass"
        text = (
            f"none are compiled here ({why}): weights of four bits are {four_bits}, most others unpacked in each pass"
        )
    return Check(name="kernels", status=OK, text=text, facts={"compiled": why is None, "reason": why})


def _pinned() -> Check:
    """Check how much memory can be locked, for layers to wait in.

    Copies from it to a device are fast and overlap with the device's work.
    """
    if not torch.cuda.is_available():
        text = "not needed without a CUDA device"
        return Check(name="pinned memory", status=OK, text=text, facts={"locked": None})
    found = try_locking(CudaDevice(torch.device("cuda", 0)))
    facts = {"locked": found.num_bytes > 0, "tried_bytes": MOST_BYTES, **dataclasses.asdict(found)}
    size = f"{found.num_bytes / GIB:.2f} GiB"
    if found.refusal is not None:
        rest = f"{size} can be locked, and no more ({found.refusal}): other layers go through staging buffers"
        return Check(name="pinned memory", status=WARN, text=f"{rest}{found.cost}", facts=facts)
    if not found.num_bytes:
        return Check(name="pinned memory", status=WARN, text="too little RAM is free to lock any", facts=facts)
    return Check(name="pinned memory", status=OK, text=f"{size} could be locked{found.cost}", facts=facts)


def _profiles(facts: MachineFacts) -> Check:
    found = list(all_profiles(profiles_folder()))
    damaged = [path.name for path, profile in found if isinstance(profile, ProfileError)]
    here = [
        profile.name
        for _, profile in found
        if not isinstance(profile, ProfileError) and profile.machine.device_name == facts.device_name
    ]
    text = f"{len(here)} of this machine, {len(found) - len(here) - len(damaged)} of others"
    if damaged:
        text += f", {len(damaged)} unreadable: {', '.join(damaged)} (`all_profiles` says why)"
    elif not here:
        text += "; edgespec profile measures a pair, and later runs use the best setting"
    names = {"here": here, "unreadable": damaged}
    return Check(name="profiles", status=WARN if damaged else OK, text=text, facts=names)
