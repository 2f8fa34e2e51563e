"""Seconds of a long prompt against one pass, every layer streamed.

    python -m scripts.bench.prefill -m CHECKPOINT --tokens 4000

Prefill and passes of one row alternate, cold: the page cache is dropped before each. Layers read are
counted: a prompt of any length is to read each layer once. Prints medians and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from edgespec import Engine, MemoryLimits
from edgespec.machine.device import DTYPES
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from offload.stream import LayerStream
from profiles.measure import drop_page_cache

GIB = 1 << 30


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    acquire, acquired = LayerStream.acquire, []

    def counted(self: LayerStream, layer: int) -> dict[str, torch.Tensor]:
        acquired.append(layer)
        return acquire(self, layer)

    LayerStream.acquire = counted  # type: ignore[method-assign]
    pair = open_pair(arguments.model, None)
    files = sorted(arguments.model.glob("*.safetensors"))
    ids = torch.arange(arguments.tokens) % (len(pair.tokenizer) - 1)
    prefill_s: list[float] = []
    pass_s: list[float] = []
    with Engine.from_pair(
        pair,
        limits=MemoryLimits(max_resident_layers=0),
        device="cpu",
        dtype=arguments.dtype,
        context_tokens=arguments.tokens + 8,
    ) as engine:
        model, num_layers = engine.target_model, engine.placement.num_layers
        for _ in range(arguments.repeats):
            text = model.new_text()
            for rows, times in ((ids, prefill_s), (ids[:1], pass_s)):
                drop_page_cache(files)
                acquired.clear()
                started = time.perf_counter()
                model.read_text(text, rows)
                times.append(time.perf_counter() - started)
                if acquired != list(range(num_layers)):
                    raise SystemExit(f"{len(rows)} rows read {len(acquired)} layers, not each of {num_layers} once")
        read_bytes = engine.placement.streamed_bytes
    prefill, one_pass = statistics.median(prefill_s), statistics.median(pass_s)
    print(
        f"{arguments.tokens} tokens: {prefill:.2f} s ({arguments.tokens / prefill:.0f} tokens/s), one pass of one row "
        f"{one_pass:.2f} s: {prefill / one_pass:.1f} times; each reads {read_bytes / GIB:.3f} GiB, every layer once"
    )
    print(json.dumps({"tokens": arguments.tokens, "prefill_s": prefill_s, "pass_s": pass_s, "read_bytes": read_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
