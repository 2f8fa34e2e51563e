"""How much memory can be locked: the staging buffers at least."""

import dataclasses

from edgespec.doctor.locked_memory import try_locking
from offload.device import CudaDevice
from offload.placement import NUM_STAGING_BUFFERS, STAGING_BYTES
from scripts.gpu.card import DEVICE
from scripts.gpu.finding import Finding, judged


def check(*, is_full: bool) -> Finding:
    """Lock memory step by step, as `edgespec doctor` does."""
    locked = try_locking(CudaDevice(DEVICE))
    found = {**dataclasses.asdict(locked), "cost": locked.cost}
    return judged(locked.num_bytes >= NUM_STAGING_BUFFERS * STAGING_BYTES, found, locked.refusal or "too little RAM")
