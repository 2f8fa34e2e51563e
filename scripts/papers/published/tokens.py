"""Exact expected tokens a pass with published drafts, at the same held-out contexts for all."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from edgespec import SamplingSettings, TreeSettings
from edgespec.pair.hub_names import MTP
from edgespec.pair.pair import DEMO_FOLDER
from scripts.papers.compare_policies import Bench, contexts
from scripts.papers.published.data import TARGET
from scripts.papers.tables.paper_table import markdown

SIZES = (1, 8, 64)
TEMPERATURES = (0.0, 1.0)
CONTEXT_TOKENS = 192
TREE = TreeSettings(policy="adaptive", size=max(SIZES), depth=8)


def drafts_of(out: Path) -> dict[str, tuple[Path, Path]]:
    """What drafts for what: name -> (target, draft), of those that are there."""
    found = {
        "built-in draft": (TARGET, DEMO_FOLDER / "draft"),
        "built-in head (CORAL)": (TARGET, DEMO_FOLDER / "head"),
        "EAGLE-3 head": (TARGET, out / "eagle3"),
        "DFlash drafter": (TARGET, out / "dflash"),
        **({"MTP layer": (out / "mtp", MTP)} if (out / "mtp" / "trained").exists() else {}),
        "EAGLE-3 head of one step": (TARGET, out / "untrained"),
    }
    return {name: pair for name, pair in found.items() if pair[0].exists() and (pair[1] == MTP or pair[1].exists())}


def row_weights(draft: PreTrainedModel) -> int:
    """The weights that a drafted row is multiplied with: those of layers and head, of experts those that it takes.

    A lent head counts. The table of embeddings is looked up, and `fc` is multiplied once a token of the text.
    """
    chosen = getattr(draft.config, "num_experts_per_tok", None)
    total = draft.get_output_embeddings().weight.numel()
    for name, parameter in draft.named_parameters():
        is_row = parameter.ndim > 1 and re.match(r"model\.layers\.|fuse\.(linear|eh_proj)", name)
        if is_row and ".experts." in name and chosen:
            total += parameter.numel() * chosen // draft.config.n_routed_experts
        elif is_row:
            total += parameter.numel()
    return total


def measure(target: Path, draft: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Mean tokens a pass by temperature and nodes, weights a row, and milliseconds that 64 nodes take to grow."""
    bench = Bench(target, draft, arguments.context_seed)
    assert bench.engine.draft_model is not None
    texts = contexts(
        bench.engine.pair.tokenizer, None, count=arguments.contexts, tokens=CONTEXT_TOKENS, seed=arguments.context_seed
    )
    found: dict[str, list[float]] = defaultdict(list)
    for index, ids in enumerate(texts):
        bench.start(ids)
        for temperature in TEMPERATURES:
            sampling = SamplingSettings(temperature=temperature)
            drafter = bench.drafter(TREE, sampling)
            values = bench.values(TREE, sampling, drafter, index, SIZES)
            for size, (tokens, _) in zip(SIZES, values, strict=True):
                found[f"T {temperature:g}, {size}"].append(tokens)
            started = time.process_time()
            bench.grow(TREE, sampling, drafter, index, 1, torch.Generator().manual_seed(index))
            found["grow_ms"].append(1e3 * (time.process_time() - started))
    weights = row_weights(bench.engine.draft_model.model)
    bench.engine.close()
    means = {name: statistics.mean(values) for name, values in found.items() if name != "grow_ms"}
    return {**means, "grow_ms": statistics.median(found["grow_ms"]), "row_weights": weights}


def print_tokens(arguments: argparse.Namespace) -> None:
    """Measure all drafts, and print a table and a line of JSON."""
    found: dict[str, Mapping[str, float]] = {}
    for name, (target, draft) in drafts_of(arguments.out).items():
        found[name] = measure(target, draft, arguments)
        print(name, {key: round(value, 3) for key, value in found[name].items()}, file=sys.stderr, flush=True)
    cells = [f"T {temperature:g}, {size}" for temperature in TEMPERATURES for size in SIZES]
    table = [["tokens a pass", *cells, "weights a row", "64 nodes"]]
    for name, values in found.items():
        row = [f"{values[cell]:.2f}" for cell in cells]
        table.append([name, *row, f"{values['row_weights'] / 1e6:.2f} M", f"{values['grow_ms']:.1f} ms"])
    print("\n".join(markdown(table)))
    print(json.dumps(found))
