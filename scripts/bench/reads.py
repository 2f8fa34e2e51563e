"""Seconds and processor seconds to bring cold layers into staging buffers: by mapped pages, and by direct reads.

    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.reads large

All layers of a checkpoint go through the ring that a device's disk tier has, which copies nothing to a device here. The
page cache is dropped before each run over all layers, of which the ring has read the first parts ahead. Runs alternate,
and medians are quoted, with the fastest and the slowest run. The last line is JSON. Exits 1 when bytes differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from offload.checkpoint import read_checkpoint
from offload.device_slots import StagingBuffer
from offload.layer_store import LayerStore
from offload.pages import fresh_pages
from offload.placement import NUM_STAGING_BUFFERS, staging_part_bytes
from offload.skeleton import build_skeleton
from offload.staging import StagingRing
from profiles.measure import drop_page_cache

GIB = 1 << 30


class Copied:
    """The event of a copy that has ended."""

    def record(self, stream: Any) -> None:
        """Nothing to note."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always."""
        return True


def main() -> int:
    """Exit code 1 when bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    checkpoint = read_checkpoint(arguments.model)
    records = build_skeleton(AutoConfig.from_pretrained(arguments.model), checkpoint, dtype=torch.bfloat16).records
    paths = sorted({entry.file for record in records for entry in record.entries})
    store = LayerStore(paths)
    num_bytes = sum(record.stored_bytes for record in records)
    part_bytes = staging_part_bytes(max(record.flat_bytes for record in records))
    buffers = [StagingBuffer(fresh_pages(part_bytes), Copied()) for _ in range(NUM_STAGING_BUFFERS)]
    seconds: dict[str, list[float]] = {"mapped": [], "direct": []}
    processor_s: dict[str, list[float]] = {"mapped": [], "direct": []}
    last = {}
    with ExitStack() as stack:
        rings = {
            way: stack.enter_context(closing(StagingRing(store, records, buffers, direct=direct)))
            for way, direct in (("mapped", ()), ("direct", records))
        }
        for _ in range(arguments.repeats):
            for way, ring in rings.items():
                drop_page_cache(paths)
                used, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
                whole = torch.empty(records[-1].flat_bytes, dtype=torch.uint8)
                for record in records:
                    for part, staging in ring.parts(record):
                        if record is records[-1]:
                            whole[part.start : part.end] = staging.bytes[: part.end - part.start]
                seconds[way].append(time.perf_counter() - started)
                now = resource.getrusage(resource.RUSAGE_SELF)
                processor_s[way].append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
                views = records[-1].flat_views(whole)
                last[way] = {name: view.clone() for name, view in views.items()}
    equal = all(torch.equal(weight, last["direct"][name]) for name, weight in last["mapped"].items())
    report: dict[str, Any] = {"gib": num_bytes / GIB, "layers": len(records), "equal": equal}
    for way, found in seconds.items():
        median_s, used_s = statistics.median(found), statistics.median(processor_s[way])
        report[way] = {"seconds": median_s, "fastest_s": min(found), "slowest_s": max(found), "processor_s": used_s}
        print(
            f"{way}: {median_s:.3f} s ({min(found):.3f} to {max(found):.3f}), "
            f"{num_bytes / GIB / median_s:.2f} GiB/s, {used_s:.3f} s of the processor's"
        )
    print(json.dumps(report))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
