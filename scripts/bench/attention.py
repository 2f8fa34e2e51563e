"""A tree's attention to a long context: in two parts, against one kernel with a mask of all rows and keys.

    python -m scripts.bench.attention
    python -m scripts.bench.attention --keys 4096 32768 --rows 64 768 --dtype bfloat16 --device cuda

Heads of an 8B model (32 of queries, 8 of keys, 128 wide). Both ways take turns. Prints a line a size: milliseconds of
both, medians; the largest difference; and the peak of what each allocates beside its result.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from edgespec.machine.device import DTYPES
from edgespec.model import attention
from edgespec.model.mechanisms.windows import WHOLE, LayerAttention
from edgespec.model.pass_cache import attended
from edgespec.model.pass_rows import PassRows, Span
from edgespec.model.text_cache import TextCache

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
MIB = 1 << 20


def a_tree(rows: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A random tree's positions [rows] and which of its nodes each sees: [rows, rows]."""
    generator = torch.Generator().manual_seed(0)
    visible = torch.zeros(rows, rows, dtype=torch.bool)
    positions = torch.full((rows,), context)
    visible[0, 0] = True
    for node in range(1, rows):
        parent = int(torch.randint(max(0, node - 40), node, (1,), generator=generator))
        visible[node] = visible[parent]
        visible[node, node] = True
        positions[node] = positions[parent] + 1
    return positions.to(device), visible.to(device)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most memory that is allocated at a time while it works."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    held = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(rows: int, context: int, *, dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, float]:
    """Both ways of one size: what a line of the table shows."""
    positions, visible = a_tree(rows, context, device)
    cache = TextCache(1)
    keys, values = (torch.randn(1, KEY_HEADS, context, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
    cache.layers[0].append(keys, values)
    del keys, values
    query = torch.randn(1, HEADS, rows, HEAD_DIM, dtype=dtype, device=device)
    new = torch.randn(1, KEY_HEADS, rows, HEAD_DIM, dtype=dtype, device=device)
    module = SimpleNamespace(layer_attention=LayerAttention(window=WHOLE, source=0), layer_idx=0)

    def read(least_shared: int) -> Tensor:
        attention.MIN_SHARED = least_shared
        cache.layers[0].length = context
        part = PassRows(cache=cache, ids=positions, positions=positions, visible=visible)
        attend = functools.partial(attention.attend, module, query, new, new, None)  # type: ignore[arg-type]
        found, _ = attended([Span(part, 0, rows)], attend)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    ways = {"one": context + 1, "two": 1}
    results = {way: read(least) for way, least in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, least in ways.items():
            started = time.perf_counter()
            read(least)
            times[way].append(1e3 * (time.perf_counter() - started))
    one, two = (statistics.median(times[way]) for way in ways)
    peaks = [peak_bytes(functools.partial(read, least), device) / MIB for least in ways.values()]
    difference = (results["one"].float() - results["two"].float()).abs().max().item()
    return {
        "rows": rows, "keys": context, "one ms": one, "two ms": two, "ratio": two / one, "difference": difference,
        "one MiB": peaks[0], "two MiB": peaks[1],
    }  # fmt: skip


def main() -> None:
    """Time both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 768])
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for context in arguments.keys:
        for rows in arguments.rows:
            found = measure(
                rows, context, dtype=DTYPES[arguments.dtype], device=torch.device(arguments.device),
                repeats=arguments.repeats,
            )  # fmt: skip
            print("  ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
