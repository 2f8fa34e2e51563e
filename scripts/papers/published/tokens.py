"""Exact expected tokens a pass of chains and trees, at the same held-out contexts for all drafts."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from edgespec import SamplingSettings, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER
from scripts.papers.compare_policies import Bench, contexts
from scripts.papers.heads.heads import TARGET
from scripts.papers.tables.paper_table import in_words, markdown

SIZES = (8, 64)
TEMPERATURES = (0.0, 1.0)
CONTEXT_TOKENS = 192
TREES = {
    "chain of 8": (TreeSettings(policy="chain", draft_tokens=8), (8,)),
    "tree": (TreeSettings(policy="adaptive", size=max(SIZES), depth=8), SIZES),
}
REFERENCE = "dspark"  # that the others are compared with
Cells = dict[str, dict[str, list[float]]]  # a draft -> a cell -> of every context


def drafts_of(model: Path, out: Path) -> dict[str, Path]:
    """The drafts that are there, by name: of the built-in target its draft and drafters of blocks, of others all."""
    folders = (path.parent for path in sorted(out.glob("*/config.json")))
    found = {path.name: path for path in folders if path.name != "untrained"}
    if model != TARGET:
        return found
    return {
        "built-in draft": DEMO_FOLDER / "draft",
        **{name: path for name, path in found.items() if name.startswith("d")},
    }


def look_at(bench: Bench, tokens: dict[str, list[float]], grow_ms: dict[str, list[float]], context: int) -> None:
    """Add the tokens a pass at the bench's context, and the processor's milliseconds to grow each tree."""
    for temperature in TEMPERATURES:
        sampling = SamplingSettings(temperature=temperature)
        for name, (largest, sizes) in TREES.items():
            drafter = bench.drafter(largest, sampling)
            values = bench.values(largest, sampling, drafter, context, sizes)
            for size, (value, _) in zip(sizes, values, strict=True):
                of = name if name != "tree" else f"{size} nodes"
                tokens[f"T {temperature:g}, {of}"].append(value)
                if temperature:
                    continue
                tree = largest if name != "tree" else replace(largest, size=size)
                started = time.process_time()
                bench.grow(tree, sampling, drafter, context, 1, torch.Generator().manual_seed(context))
                grow_ms[of].append(1e3 * (time.process_time() - started))


def print_tokens(arguments: argparse.Namespace) -> None:
    """Measure all drafts, which take turns at each context; print tables and a line of JSON."""
    drafts = drafts_of(arguments.model, arguments.out)
    benches = {
        name: Bench(arguments.model, draft, arguments.context_seed, num_noises=arguments.noises)
        for name, draft in drafts.items()
        if name in (arguments.drafts or [name])
    }
    tokens: Cells = {name: defaultdict(list) for name in benches}
    grow_ms: Cells = {name: defaultdict(list) for name in benches}
    tokenizer = next(iter(benches.values())).engine.pair.tokenizer
    folder = None if arguments.model == TARGET else arguments.out / "held-out"
    texts = contexts(tokenizer, folder, count=arguments.contexts, tokens=CONTEXT_TOKENS, seed=arguments.context_seed)
    for index, ids in enumerate(texts):
        going_on: dict[Any, list[int]] = {}  # how the target goes on, whatever the draft
        for name, bench in benches.items():
            bench.start(ids)
            bench._texts = going_on
            look_at(bench, tokens[name], grow_ms[name], index)
        print(f"{index + 1} of {len(texts)} contexts", file=sys.stderr, flush=True)
    for bench in benches.values():
        bench.engine.close()
    print("\n".join(_table(tokens, grow_ms)))
    means = {name: {cell: statistics.mean(found) for cell, found in cells.items()} for name, cells in tokens.items()}
    print(json.dumps({"contexts": len(texts), "tokens": means}))


def _table(tokens: Cells, grow_ms: Cells) -> Sequence[str]:
    cells, trees = list(next(iter(tokens.values()))), list(next(iter(grow_ms.values())))
    table = [["tokens a pass", *cells, f"ms to grow: {', '.join(trees)}"]]
    for name, found in tokens.items():
        times = ", ".join(f"{statistics.median(grow_ms[name][tree]):.1f}" for tree in trees)
        table.append([name, *(f"{statistics.mean(found[cell]):.2f}" for cell in cells), times])
    for name in (name for name in tokens if REFERENCE in tokens and name != REFERENCE):
        pairs = (zip(tokens[name][cell], tokens[REFERENCE][cell], strict=True) for cell in cells)
        gains = [in_words([one - other for one, other in pair]) for pair in pairs]
        table.append([f"{name} - {REFERENCE}", *gains, ""])
    return markdown(table)
