"""The pair's own acceptance model, fitted on its prompts while there is time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.train.collect import RecordRun, acceptance_settings, collect
from edgespec.train.fit import fit_acceptance
from edgespec.train.networks import FitSettings
from edgespec.train.record_files import load_records

TREE_SIZE, NEW_TOKENS = 64, 24  # of what is recorded
FIT_STEPS = 1200
MIN_TREES = 64  # to fit a model to: of fewer, it learns these texts by heart


def fit_pair(
    engine: Engine,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    *,
    seed: int,
    report: Callable[[str, float], None],
    until_s: float,
) -> tuple[AcceptanceModel | None, float | None]:
    """Return a model of the pair's own and its calibration error on held-out prompts; None where trees are too few.

    `until_s` is on the clock of time.perf_counter.
    """
    size = min(TREE_SIZE, engine.largest_tree.num_nodes)
    settings = acceptance_settings(size=size, temperatures=temperatures, truncated=engine.pair.default_sampling())
    parts, num_trees = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for number, ids in enumerate(prompts):
            own = Path(folder) / str(number)
            run = RecordRun(kind="acceptance", max_new_tokens=NEW_TOKENS, seed=seed + number)
            collect(engine, [ids], own, settings, run=run)
            records, headers = load_records(own)
            parts.append(records | {"prompt": torch.full_like(records["prompt"], number)})
            num_trees += sum(header.num_trees for header in headers)
            report("learning acceptance", (number + 1) / len(prompts))
            if number and time.perf_counter() > until_s:  # of two prompts, one is held out
                break
    report("learning acceptance", 1.0)
    if num_trees < MIN_TREES:
        return None, None
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    try:
        model, found = fit_acceptance(joined, settings=FitSettings(steps=FIT_STEPS, seed=seed))
    except EdgespecError:  # there are no two prompts
        return None, None
    return model, min(1.0, found.calibration_error)
