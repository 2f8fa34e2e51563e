"""How many weights a second are unpacked, for each published format, on this machine.

    python -m scripts.bench.formats --rows 2048 --columns 4096 --device cpu
    python -m scripts.bench.formats --only IQ                                   GGUF's types of few bits

Formats, and types of GGUF files, are unpacked in turn, several times; the table has the median and the best of them.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.formats.gguf_blocks import LEAVES
from offload.formats.storage import PackedStorage
from offload.layouts.known import storage_of

GROUP = 128
COMPRESSED = {"quant_method": "compressed-tensors"}


def words(*shape: int) -> Tensor:
    """Return random words of numbers."""
    return torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32)


def formats(rows: int, columns: int) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Return format -> what config.json states, and a matrix's parts."""
    float8 = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    halves = torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8)
    groups = columns // GROUP
    gptq = {
        "qweight": words(columns // 8, rows),
        "qzeros": words(groups, rows // 8),
        "scales": torch.rand(groups, rows).half(),
        "g_idx": (torch.randperm(columns) // GROUP).to(torch.int32),
    }
    awq = {**gptq, "qweight": words(columns, rows // 8)}
    nvfp4_scale = torch.rand(rows, columns // 16).to(torch.float8_e4m3fn)
    return {
        "fp8, blocks": ({"quant_method": "fp8"}, {
            "weight": float8, "weight_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128))}),
        "fp8, rows": (COMPRESSED, {"weight": float8, "weight_scale": torch.rand(rows, 1)}),
        "nvfp4": (COMPRESSED, {
            "weight_packed": halves, "weight_scale": nvfp4_scale, "weight_global_scale": torch.ones(1)}),
        "mxfp4": (COMPRESSED, {
            "weight_packed": halves, "weight_scale": torch.full((rows, columns // 32), 120, dtype=torch.uint8)}),
        "pack-quantized": (COMPRESSED, {
            "weight_packed": words(rows, columns // 8), "weight_scale": torch.rand(rows, groups).bfloat16()}),
        "gptq": ({"quant_method": "gptq"}, gptq),
        "gptq, act-order": ({"quant_method": "gptq", "desc_act": True}, gptq),
        "awq": ({"quant_method": "awq"}, awq),
        **{kind.name: ({"quant_method": "gguf"}, {
            leaf: torch.randint(0, 256, (rows, columns // kind.weights * kind.num_bytes)).to(torch.uint8)})
           for leaf, kind in LEAVES.items() if not kind.is_unpacked},
    }  # fmt: skip


def found(
    stated: dict[str, Any], parts: dict[str, Tensor], shape: tuple[int, int]
) -> tuple[PackedStorage, dict[str, Tensor]]:
    """Return how the matrix is packed, and its parts by the packing's names."""
    stored = {
        f"a.{leaf}": (TensorEntry.planned(f"a.{leaf}", tuple(part.shape), part.dtype),) for leaf, part in parts.items()
    }
    packing = storage_of("a.weight", shape, stored, stated)
    assert packing is not None
    names = packing.stored_names("a.weight")
    return packing, {part: parts[name.removeprefix("a.")] for part, name in names.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="part of a format's name")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, shape = torch.device(arguments.device), (arguments.rows, arguments.columns)
    cases = {name: case for name, case in formats(*shape).items() if arguments.only in name}
    print(f"million weights a second, {shape[0]} x {shape[1]}, {arguments.threads} threads, {device}: median (best)")
    for (name, dtype), measured in rates(cases, shape, device, rounds=arguments.rounds).items():
        median, best = statistics.median(measured), max(measured)
        print(f"{name:18}{str(dtype).removeprefix('torch.'):10}{median:8.0f} ({best:.0f})")


def rates(
    cases: dict[str, tuple[dict[str, Any], dict[str, Tensor]]],
    shape: tuple[int, int],
    device: torch.device,
    *,
    rounds: int,
) -> dict[tuple[str, torch.dtype], list[float]]:
    """Return the million weights a second of each round, by format and by the numbers that are made."""
    measured: dict[tuple[str, torch.dtype], list[float]] = {}
    packed = {name: found(*case, shape) for name, case in cases.items()}
    for _ in range(rounds):
        for name, (packing, parts) in packed.items():
            on_device = {part: tensor.to(device) for part, tensor in parts.items()}
            for dtype in (torch.float32, torch.bfloat16):
                out = torch.empty(shape, dtype=dtype, device=device)
                packing.unpack(on_device, out)
                started = _now(device)
                packing.unpack(on_device, out)
                seconds = _now(device) - started
                measured.setdefault((name, dtype), []).append(shape[0] * shape[1] / 1e6 / seconds)
    return measured


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
