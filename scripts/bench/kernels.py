"""Products with packed weights: how long they take by the number of rows, how far off they are, and whose bits hold.

    python -m scripts.bench.kernels                  our own formats, published ones, and types of GGUF files
    python -m scripts.bench.kernels --only q5_
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m scripts.bench.kernels

The last line computes as a processor without AVX-512 does, by kernels that are compiled for one. Formats take turns. A
line has the median milliseconds for each number of rows, the relative error of few and of all rows against float64
products of the exact weights, and up to how many rows (80 are tried) each row has the bits that it has alone on one
thread. "Unpacked" is the weight unpacked to bf16 for each product, "as it lies" one of GGML's blocks that are not put
in another order. Published formats without a kernel are left out. One thread is timed by its own time, several by the
clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from offload.formats.gguf_blocks import LEAVES
from offload.formats.storage import PackedStorage, Quantizer
from offload.layouts.at_load import layout_at_load
from offload.layouts.int4 import Int4
from offload.layouts.int4_orders import kernel_order, torch_order
from offload.layouts.known import LOSSLESS, QUANTIZERS, kernel_of
from offload.layouts.layout import Kernel
from offload.layouts.onednn import has_onednn, layer_product
from scripts.bench.formats import formats, found
from tests.support.block_scales import HALVES

MAX_SAME = 80
FEW = 16  # rows that every kernel multiplies with packed weights
SCALE = 0.02
CPU = torch.device("cpu")
# type of GGUF -> scale and minimum of a block, with which weights lie around zero
SIZES = {
    "Q4_1": (SCALE, -7.5 * SCALE), "Q5_1": (SCALE, -15.5 * SCALE), "Q4_K": (SCALE, 7.5 * SCALE),
    "Q5_K": (SCALE, 15.5 * SCALE), "Q2_K": (SCALE, 1.5 * SCALE),
}  # fmt: skip
Multiply = Callable[[Tensor], Tensor]  # bf16 rows [n, i] -> [n, r]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to multiply, and the weights that it stands for: float32."""

    multiply: Multiply
    exact: Tensor


def plain_cases(weight: Tensor) -> dict[str, Case]:
    """Return products with weights that are not packed: torch's own, and those of streamed and resident layers."""
    in_bf16 = weight.bfloat16()
    cases = {
        "bf16": Case(multiply=lambda rows: functional.linear(rows, in_bf16), exact=weight),
        "float32": Case(multiply=lambda rows: functional.linear(rows.float(), weight), exact=weight),
    }
    for name, own in (("bf16", in_bf16), ("float32", weight)):
        if has_onednn(own.dtype):
            cases[f"{name}, oneDNN"] = Case(multiply=layer_product(own, is_resident=False), exact=weight)
            cases[f"{name}, oneDNN, resident"] = Case(multiply=layer_product(own, is_resident=True), exact=weight)
    return cases


def packed_cases(
    name: str, packing: PackedStorage, parts: dict[str, Tensor], shape: tuple[int, int]
) -> dict[str, Case]:
    """Return products with the packed weight, as a model's layer computes them, and with the unpacked one."""
    exact, scratch = packing.unpack(parts, torch.empty(shape)), torch.empty(shape, dtype=torch.bfloat16)
    kernel, kept = layer_kernel(packing, parts, shape)

    def unpacked(rows: Tensor) -> Tensor:
        return functional.linear(rows, packing.unpack(parts, scratch))

    cases = {f"{name}, unpacked": Case(multiply=unpacked, exact=exact)}
    if kernel is None:
        return cases

    def multiply(rows: Tensor) -> Tensor:
        return kernel.multiply(kept, rows, None) if len(rows) <= kernel.max_rows else unpacked(rows)

    cases = {name: Case(multiply=multiply, exact=exact)} | cases
    as_it_lies = kernel_of(packing, shape, torch.bfloat16, CPU)
    if as_it_lies is not None and kept is not parts:
        cases[f"{name}, as it lies"] = Case(multiply=lambda rows: as_it_lies.multiply(parts, rows, None), exact=exact)
    return cases


def layer_kernel(
    packing: PackedStorage, parts: dict[str, Tensor], shape: tuple[int, int]
) -> tuple[Kernel | None, Mapping[str, Tensor]]:
    """Return the kernel that a layer on a CPU uses, and the parts that it is given: of a kept file, or made at load."""
    at_load = layout_at_load(packing, shape, torch.bfloat16, CPU)
    own = kernel_of(packing, shape, torch.bfloat16, CPU)
    if own is not None and (at_load is None or at_load.layout.is_slow):
        return own, parts
    for layout in LOSSLESS:
        repacked = layout.repacked(packing, shape, None)
        if repacked is not None:
            kernel = layout.kernel(repacked.storage, shape, torch.bfloat16, CPU)
            return kernel, repacked.repack("weight", parts)
    return (None, parts) if at_load is None else (at_load.kernel, at_load.parts_of(parts))


def published_cases(shape: tuple[int, int], only: str) -> dict[str, Case]:
    """Return products with published weights of random numbers, whose scales and minima are like those of models."""
    cases: dict[str, Case] = {}
    for name, (stated, stored) in formats(*shape).items():
        if only.lower() not in name.lower():
            continue
        if name in HALVES:
            (blocks,) = stored.values()
            blocks = blocks.view(-1, next(kind.num_bytes for kind in LEAVES.values() if kind.name == name))
            for place, size in zip(HALVES[name], SIZES.get(name, (SCALE,)), strict=False):
                numbers = size * (0.75 + 0.5 * torch.rand(len(blocks), 1)).half()
                blocks[:, place : place + 2] = numbers.view(torch.uint8)
        packing, parts = found(stated, stored, shape)
        for case, products in packed_cases(name, packing, parts, shape).items():
            if f"{name}, unpacked" != case or name in cases:
                cases[case] = products
    return cases


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=[4096, 4096], metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 80, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="part of a format's name")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    weight = torch.randn(*arguments.shape) * SCALE
    inputs = torch.randn(max(*arguments.rows, MAX_SAME), weight.shape[1]).bfloat16()
    shape = (weight.shape[0], weight.shape[1])
    packers: list[tuple[str, Quantizer]] = [(packer.name, packer) for packer in QUANTIZERS]
    cases = plain_cases(weight)
    packers += [("int4 in groups of 128", Int4(group_size=128))]
    of_torch = torch_order()
    if of_torch not in {None, kernel_order()}:
        packers += [("int4, torch's kernel", Int4(order=of_torch))]
    for name, packer in packers:
        if arguments.only.lower() in name:
            cases |= packed_cases(name, *packer.pack(weight), shape)
    cases |= published_cases(shape, arguments.only)
    torch.set_num_threads(arguments.threads)
    times: dict[tuple[str, int], list[float]] = {}
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    for repeat in range(-1, arguments.repeats):  # the first starts threads, and fills caches
        for name, case in cases.items():
            for count in arguments.rows:
                started = clock()
                case.multiply(inputs[:count])
                times.setdefault((name, count), []).append(1e3 * (clock() - started))
                if repeat < 0:
                    times[name, count].clear()
    print(
        f"{weight.shape[0]} x {weight.shape[1]}, {arguments.threads} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    print(f"{'rows':32}" + "".join(f"{count:8}" for count in arguments.rows) + f"   error of {FEW}   of all  same bits")
    for name, case in cases.items():
        medians = "".join(f"{statistics.median(times[name, count]):8.2f}" for count in arguments.rows)
        errors = [error(case, inputs[:count]) for count in (FEW, max(arguments.rows))]
        print(f"{name:32}{medians}{errors[0]:14.5f}{errors[1]:9.5f}{same_rows(case, inputs):11}", flush=True)


def error(case: Case, rows: Tensor) -> float:
    """Return the relative error of products against float64."""
    expected = rows.double() @ case.exact.double().T
    return ((case.multiply(rows).double() - expected).norm() / expected.norm()).item()


def same_rows(case: Case, inputs: Tensor) -> int:
    """Return up to how many rows beside each other each has the bits that it has alone on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([case.multiply(row) for row in inputs[:MAX_SAME].split(1)])
    torch.set_num_threads(num_threads)
    counts = range(1, MAX_SAME + 1)
    different = (n for n in counts if not torch.equal(case.multiply(inputs[:n]), alone[:n]))
    return next(different, MAX_SAME + 1) - 1


if __name__ == "__main__":
    main()
