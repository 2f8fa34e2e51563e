"""Triton's kernels unpack FP4, even steps and GGML's blocks as torch's operations do; milliseconds of both."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.formats import even_steps, fp4
from offload.formats.four_bits_kernel import unpack_fp4
from offload.formats.gguf_blocks import TYPES
from offload.formats.gguf_kernel import NAMES, runs_on, unpack_on_card
from offload.formats.gguf_unpacking import unpack_blocks
from offload.layouts.known import storage_of
from scripts.gpu.card import DEVICE, half_dtype, seconds
from scripts.gpu.finding import Finding, judged, skipped

EXPERTS, EXPERT_ROWS, EXPERT_COLUMNS, EXPERT_GROUP = 4, 5760, 2880, 32  # gpt-oss'
ROWS, COLUMNS, GROUP = 14336, 4096, 128  # a matrix of Llama-3-8B
LAYOUTS: dict[str, dict[str, tuple[tuple[int, int], torch.dtype]]] = {
    "gptq": {
        "qweight": ((COLUMNS // 8, ROWS), torch.int32), "qzeros": ((COLUMNS // GROUP, ROWS // 8), torch.int32),
        "scales": ((COLUMNS // GROUP, ROWS), torch.float16),
    },
    "awq": {
        "qweight": ((COLUMNS, ROWS // 8), torch.int32), "qzeros": ((COLUMNS // GROUP, ROWS // 8), torch.int32),
        "scales": ((COLUMNS // GROUP, ROWS), torch.float16),
    },
    "compressed-tensors": {
        "weight_packed": ((ROWS, COLUMNS // 8), torch.int32),
        "weight_scale": ((ROWS, COLUMNS // GROUP), torch.bfloat16),
    },
}  # fmt: skip


def check(*, is_full: bool) -> Finding:
    """Compare experts in FP4 with scales from 2^-127 on, and a matrix in each order of words and each type of GGML."""
    if find_spec("triton") is None:
        return skipped("Triton is not installed: torch's operations unpack")
    is_used = all(module.has_kernel(DEVICE, half_dtype()) for module in (fp4, even_steps))
    report = {"mxfp4": experts(), **{name: matrix(name, is_act_order=False) for name in LAYOUTS}}
    is_used = is_used and all(runs_on(name, DEVICE, half_dtype()) for name in NAMES)
    report["gptq-act-order"] = matrix("gptq", is_act_order=True)
    report |= {name: blocks(name) for name in NAMES}
    differing = sum(found["differing"] for found in report.values())
    return judged(not differing and is_used, {"is_used": is_used, **report}, "the kernel differs, or is not used")


def experts() -> dict[str, Any]:
    """Return how experts of gpt-oss compare."""
    packed = torch.randint(256, (EXPERTS, EXPERT_ROWS, EXPERT_COLUMNS // 2), device=DEVICE).to(torch.uint8)
    powers = torch.randint(-127, 126, (EXPERTS, EXPERT_ROWS, EXPERT_COLUMNS // EXPERT_GROUP), device=DEVICE)
    scale = torch.exp2(powers.float())
    return compared(
        lambda out: unpack_fp4(packed, scale, out),
        lambda out: fp4.unpack_by_table(packed, scale, out),
        (EXPERTS, EXPERT_ROWS, EXPERT_COLUMNS),
    )


def matrix(name: str, *, is_act_order: bool) -> dict[str, Any]:
    """Return how a matrix in a published format compares; its groups may be those of an order of activations."""
    parts = {
        leaf: torch.rand(shape, device=DEVICE).to(dtype)
        if dtype.is_floating_point
        else torch.randint(-(2**31), 2**31, shape, device=DEVICE).to(dtype)
        for leaf, (shape, dtype) in LAYOUTS[name].items()
    }
    if is_act_order:
        parts["g_idx"] = (torch.randperm(COLUMNS, device=DEVICE) // GROUP).int()
    stored = {
        f"m.{leaf}": (TensorEntry.planned(f"m.{leaf}", tuple(part.shape), part.dtype),) for leaf, part in parts.items()
    }
    packing = storage_of("m.weight", (ROWS, COLUMNS), stored, {"quant_method": name, "desc_act": is_act_order})
    assert packing is not None
    steps = packing.even_steps
    assert steps is not None
    named = {part: parts[leaf.removeprefix("m.")] for part, leaf in packing.stored_names("m.weight").items()}
    return compared(
        lambda out: packing.unpack(named, out[0]),
        lambda out: even_steps.unpack_steps(steps.read(named), out),
        (1, ROWS, COLUMNS),
    )


def blocks(name: str) -> dict[str, Any]:
    """Return how a matrix in GGML's blocks of any bytes compares."""
    block = TYPES[name]
    given = torch.randint(256, (ROWS, COLUMNS // block.weights * block.num_bytes), device=DEVICE).to(torch.uint8)
    found = compared(
        lambda out: unpack_on_card(block, given, out[0]),
        lambda out: unpack_blocks(block, given.view(-1, block.num_bytes), out.view(-1, block.weights)),
        (1, ROWS, COLUMNS),
    )
    return {**found, "gigabytes_a_second": (given.nbytes + 2 * ROWS * COLUMNS) / found["kernel_ms"] / 1e6}


def compared(
    by_kernel: Callable[[Tensor], object], by_torch: Callable[[Tensor], object], shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return how many weights differ in their bits, and how long both ways take."""
    found, expected = (torch.empty(shape, dtype=half_dtype(), device=DEVICE) for _ in range(2))
    by_kernel(found)  # an error of the compiler is to be seen
    by_torch(expected)
    is_same = (found.view(torch.int16) == expected.view(torch.int16)) | (found.isnan() & expected.isnan())
    return {
        "differing": int((~is_same).sum()),
        "kernel_ms": 1e3 * seconds(lambda: by_kernel(found)),
        "torch_ms": 1e3 * seconds(lambda: by_torch(expected)),
    }
