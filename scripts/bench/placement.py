"""Seconds a pass with the resident layers first, and with them spread over the depth, on a simulated link.

    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.placement large --resident 6 --link-gib-per-s 0.5

Both models stream in one process and take turns. A load of a layer takes at least bytes / rate; between passes there is
time for the ring to read ahead, as there is while a draft grows a tree. Of a pass, the slowest of the link and of
computing is the least that is possible: computing is timed with all layers resident. The last line is JSON. Exits 1
when the logits differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from transformers import AutoConfig

from offload.checkpoint import read_checkpoint
from offload.placement import Placement, place_layers
from offload.skeleton import build_skeleton
from offload.streamed_model import StreamedModel
from scripts.situations import GIB, throttle_edgespec

CPU = torch.device("cpu")
UNLIMITED = 1 << 50


def open_model(folder: Path, *, num_resident: int | None, is_prefix: bool) -> tuple[StreamedModel, Placement]:
    """The model with so many layers resident, in bfloat16."""
    skeleton = build_skeleton(AutoConfig.from_pretrained(folder), read_checkpoint(folder), dtype=torch.bfloat16)
    placement = place_layers(skeleton.records, device_uses={}, device_budget_bytes=UNLIMITED, max_resident=num_resident)
    if is_prefix:
        placement = dataclasses.replace(placement, resident_layers=frozenset(range(placement.num_resident)))
    return StreamedModel(skeleton, placement, device=CPU), placement


def main() -> int:
    """Exit code 1 when the logits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--resident", type=int, required=True, help="layers")
    parser.add_argument("--link-gib-per-s", type=float, required=True)
    parser.add_argument("--rows", type=int, default=64, help="of a pass")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    link_bytes_per_s = arguments.link_gib_per_s * GIB
    throttle_edgespec(link_bytes_per_s)
    ids = torch.arange(arguments.rows)[None] % 1000
    times: dict[str, list[float]] = {"resident": [], "prefix": [], "spread": []}
    logits = {}
    with ExitStack() as stack, torch.no_grad():
        models = {}
        for name in times:
            resident = None if name == "resident" else arguments.resident
            model, placement = open_model(arguments.model, num_resident=resident, is_prefix=name == "prefix")
            models[name] = stack.enter_context(closing(model)).model
        ahead_s = placement.num_slots * placement.streamed_bytes / placement.num_layers / link_bytes_per_s
        for repeat in range(arguments.repeats + 1):
            for name, model in models.items():
                time.sleep(2 * ahead_s)
                started = time.perf_counter()
                logits[name] = model(input_ids=ids, use_cache=False).logits
                if repeat:  # the first one warms up
                    times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    link_s = placement.streamed_bytes / link_bytes_per_s
    equal = all(torch.equal(found, logits["resident"]) for found in logits.values())
    streamed = placement.num_layers - placement.num_resident
    print(f"{streamed} of {placement.num_layers} layers over {arguments.link_gib_per_s} GiB/s: {link_s:.3f} s a pass")
    print(f"computing {medians['resident']:.3f} s; {arguments.rows} rows, {placement.num_slots} slots")
    print(f"resident layers first {medians['prefix']:.3f} s, spread {medians['spread']:.3f} s")
    print(f"logits {'equal' if equal else 'DIFFER'}")
    print(json.dumps({"medians_s": medians, "times_s": times, "link_s": link_s, "equal": equal,
                      "options": vars(arguments) | {"model": arguments.model.name}}))  # fmt: skip
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
