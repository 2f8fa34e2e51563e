"""Exact expected tokens a pass with published drafts, at the same held-out contexts for all."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from edgespec import SamplingSettings, TreeSettings
from edgespec.hub.names import MTP
from edgespec.pair.pair import DEMO_FOLDER
from scripts.papers.compare_policies import Bench, contexts
from scripts.papers.published.data import TARGET
from scripts.papers.published.equal_cost import DEPTHS, NODES, Grown, equal_cost_table
from scripts.papers.tables.paper_table import markdown

SIZES = (1, 8, 64)
TEMPERATURES = (0.0, 1.0)
CONTEXT_TOKENS = 192
BUILT_IN = "built-in draft"
TREE = TreeSettings(policy="adaptive", size=max(SIZES), depth=8)


def drafts_of(out: Path) -> dict[str, tuple[Path, Path]]:
    """What drafts for what: name -> (target, draft), of those that are there."""
    found = {
        BUILT_IN: (TARGET, DEMO_FOLDER / "draft"),
        "built-in head (CORAL)": (TARGET, DEMO_FOLDER / "head"),
        "EAGLE-3 head": (TARGET, out / "eagle3"),
        "DFlash drafter": (TARGET, out / "dflash"),
        "DSpark drafter": (TARGET, out / "dspark"),
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


@dataclass
class Measured:
    """What was found with one draft, an entry a context."""

    row_weights: int
    tokens: dict[tuple[float, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    grow_ms: dict[tuple[float, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def grown(self, temperature: float, nodes: int, depth: int) -> Grown:
        """Return the mean tokens, and the median time, of trees of this size and depth."""
        key = temperature, nodes, depth
        tokens, grow_ms = statistics.mean(self.tokens[key]), statistics.median(self.grow_ms[key])
        return Grown(nodes=nodes, depth=depth, tokens=tokens, grow_ms=grow_ms)


def look_at(bench: Bench, found: Measured, context: int, trees: Mapping[int, Sequence[int]]) -> None:
    """Add the tokens a pass of trees (depth -> nodes) at the bench's context, and the processor's time to grow them."""
    for temperature in TEMPERATURES:
        sampling = SamplingSettings(temperature=temperature)
        for depth, sizes in trees.items():
            largest = replace(TREE, size=max(sizes), depth=depth)
            drafter = bench.drafter(largest, sampling)
            values = bench.values(largest, sampling, drafter, context, sizes)
            for size, (tokens, _) in zip(sizes, values, strict=True):
                tree = replace(TREE, size=size, depth=depth)
                started = time.process_time()
                bench.grow(tree, sampling, drafter, context, 1, torch.Generator().manual_seed(context))
                found.grow_ms[temperature, size, depth].append(1e3 * (time.process_time() - started))
                found.tokens[temperature, size, depth].append(tokens)


def measure(pairs: Mapping[str, tuple[Path, Path]], arguments: argparse.Namespace) -> dict[str, Measured]:
    """Measure trees of all drafts, which take turns at each context."""
    benches = {name: Bench(*pair, arguments.context_seed) for name, pair in pairs.items()}
    found = {}
    for name, bench in benches.items():
        assert bench.engine.draft_model is not None
        found[name] = Measured(row_weights=row_weights(bench.engine.draft_model.model))
    tokenizer = benches[BUILT_IN].engine.pair.tokenizer
    texts = contexts(tokenizer, None, count=arguments.contexts, tokens=CONTEXT_TOKENS, seed=arguments.context_seed)
    for index, ids in enumerate(texts):
        for name, bench in benches.items():
            bench.start(ids)
            own = {depth: [size for size in NODES if size >= depth] for depth in DEPTHS}
            trees = own if name == BUILT_IN else {TREE.depth: SIZES}
            look_at(bench, found[name], index, {**trees, TREE.depth: sorted({*trees[TREE.depth], *SIZES})})
        print(f"{index + 1} of {len(texts)} contexts", file=sys.stderr, flush=True)
    for bench in benches.values():
        bench.engine.close()
    return found


def print_tokens(arguments: argparse.Namespace) -> None:
    """Measure all drafts, and print a table, one at equal cost, and a line of JSON."""
    found = measure(drafts_of(arguments.out), arguments)
    cells = {f"T {at:g}, {size}": (at, size) for at in TEMPERATURES for size in SIZES}
    trees = {
        name: {cell: of.grown(at, size, TREE.depth) for cell, (at, size) in cells.items()} for name, of in found.items()
    }
    table = [["tokens a pass", *cells, "weights a row", "64 nodes"]]
    for name, of in found.items():
        row = [f"{trees[name][cell].tokens:.2f}" for cell in cells]
        grow_ms = statistics.median(ms for at in TEMPERATURES for ms in of.grow_ms[at, max(SIZES), TREE.depth])
        table.append([name, *row, f"{of.row_weights / 1e6:.2f} M", f"{grow_ms:.1f} ms"])
    print("\n".join(markdown(table)))
    built_in = {
        at: [found[BUILT_IN].grown(*key) for key in found[BUILT_IN].tokens if key[0] == at] for at in TEMPERATURES
    }
    others = {name: of for name, of in trees.items() if name != BUILT_IN}
    print("\n".join(markdown(equal_cost_table(others, built_in, {cell: at for cell, (at, _) in cells.items()}))))
    print(json.dumps({name: {cell: asdict(tree) for cell, tree in of.items()} for name, of in trees.items()}))
