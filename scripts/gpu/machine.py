"""The card, its driver, the versions, and what memory is free before anything runs."""

import dataclasses
import os
from importlib.util import find_spec

import torch

from edgespec.machine.environment import ALLOCATOR_VARIABLES, segments_may_grow, spills_in_silence
from profiles.measure import machine_facts
from scripts.gpu.card import DEVICE
from scripts.gpu.finding import Finding, judged


def check(*, is_full: bool) -> Finding:
    """Read the facts, and compute once: a torch that lacks this card's kernels fails here."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(DEVICE)
    found = {
        **dataclasses.asdict(machine_facts(DEVICE)),
        "cuda": torch.version.cuda,
        "capability": torch.cuda.get_device_capability(DEVICE),
        "kernels_for": torch.cuda.get_arch_list(),
        "cards": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "segments_grow": segments_may_grow(),
        "spills_in_silence": spills_in_silence(),
        "allocator": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
        "has_triton": find_spec("triton") is not None,
    }
    return judged(torch.ones(4, device=DEVICE).sum().item() == 4, found, "the card computes wrongly")
