"""Streamed passes are resident ones, within the plan's memory, without allocations after the first pass.

Layers wait in locked memory, or on the disk, or some stay on the card. With the pass times: how far the slower of
copies and arithmetic hides the other.
"""

from collections.abc import Sequence
from typing import Any

import torch

from edgespec import EdgespecError
from edgespec.pair.pair import ModelPair
from offload.placement import NUM_STAGING_BUFFERS, PINNED, STAGING, Placement, staging_part_bytes
from scripts.gpu.card import DEVICE, GIB, SHAPES, PassFacts, run_passes, seconds, written_shape
from scripts.gpu.finding import Finding, judged

SHORT_SHAPES = ("7B-like",)
ROWS, ALL_ROWS = (1, 64), (1, 64, 256, 768)


def check(*, is_full: bool) -> Finding:
    """Check each shape, format and number of rows; what does not fit the card is left out, and says so."""
    rates = copy_rates()
    table: list[dict[str, Any]] = []
    for name in SHAPES if is_full else SHORT_SHAPES:
        with written_shape(name) as pair:
            for quant in ("none", "nf4"):
                for rows in ALL_ROWS if is_full else ROWS:
                    row: dict[str, Any] = {"shape": name, "quant": quant, "rows": rows}
                    try:
                        if quant != "none" and rows == ROWS[0]:
                            run_passes(pair, 1, quant=quant)  # packs the layers, which takes memory of its own
                        row |= check_streaming(pair, rows, quant, rates["pinned_gib_per_s"])
                    except EdgespecError as error:
                        if error.code != "E_MEMORY":
                            raise
                        row |= {"faults": [], "left_out": error.what}
                    table.append(row)
                    print(row, flush=True)
    faults = sorted({fault for row in table for fault in row["faults"]})
    return judged(not faults, {**rates, "table": table}, ", ".join(faults))


def check_streaming(pair: ModelPair, rows: int, quant: str, pinned_gib_per_s: float) -> dict[str, Any]:
    """Compare resident layers with those streamed from locked memory and from files."""
    resident = run_passes(pair, rows, quant=quant)
    pinned = run_passes(pair, rows, quant=quant, max_resident_layers=0)
    mixed = run_passes(pair, rows, quant=quant, max_resident_layers=1)
    files = run_passes(
        pair, rows, quant=quant, max_resident_layers=0, max_cpu_bytes=bytes_for_no_layer(pinned.placement)
    )
    pass_gib = pinned.placement.streamed_bytes / GIB
    runs = (resident, pinned, mixed, files)
    return {
        "resident_ms": resident.pass_s * 1e3,
        "pinned_ms": pinned.pass_s * 1e3,
        "files_ms": files.pass_s * 1e3,
        "pass_gib": pass_gib,
        "gib_per_s": pass_gib / pinned.pass_s,
        "overlap": max(pass_gib / pinned_gib_per_s, resident.pass_s) / pinned.pass_s,  # 1: the slower hides the other
        "peak_gib": [run.peak_bytes / GIB for run in runs],
        "planned_gib": [run.planned_bytes / GIB for run in runs],
        "faults": faults_of(runs),
    }


def faults_of(runs: Sequence[PassFacts]) -> list[str]:
    """Return what is wrong with runs whose layers are resident in the first, and come from files in the last."""
    placement = runs[-1].placement
    holds = {
        "logits differ": all(torch.equal(runs[0].logits, run.logits) for run in runs),
        "memory is allocated after the first pass": all(run.num_allocations == 0 for run in runs),
        "the plan's memory is exceeded": all(run.peak_bytes <= run.planned_bytes for run in runs),
        "layers that were to come from files do not": placement.num_on_disk == placement.num_layers,
    }
    return [fault for fault, is_held in holds.items() if not is_held]


def bytes_for_no_layer(pinned: Placement) -> int:
    """Return the limit of RAM that leaves room for staging buffers, and for no layer beside them."""
    layer_bytes = pinned.streamed_bytes // pinned.num_layers
    others = sum(used for label, used in pinned.host_bytes.items() if not label.endswith((PINNED, STAGING)))
    return others + NUM_STAGING_BUFFERS * staging_part_bytes(layer_bytes) + layer_bytes // 2


def copy_rates() -> dict[str, float]:
    """Host to device, GiB/s."""
    device = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(GIB, dtype=torch.uint8)
    return {
        "pinned_gib_per_s": 1 / seconds(lambda: device.copy_(pinned, non_blocking=True)),
        "pageable_gib_per_s": 1 / seconds(lambda: device.copy_(pageable)),
    }
