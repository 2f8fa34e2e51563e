"""Exact expected tokens a pass with heads as drafts, at the same held-out contexts for everybody."""

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor

from edgespec import SamplingSettings, TreeSettings
from scripts.papers.compare_policies import Bench, Cell, contexts
from scripts.papers.heads.heads import DRAFT
from scripts.papers.tables.paper_table import in_words, markdown

TEMPERATURES = (0.0, 1.0)
CONTEXT_TOKENS = 192
TREES = {
    "chain": TreeSettings(policy="chain", draft_tokens=7),
    "eagle2": TreeSettings(policy="eagle2", size=60, depth=7, max_children=10),
    "adaptive": TreeSettings(policy="adaptive", size=60, depth=7),
}
# What the papers say is ahead of what: HASS of EAGLE, and CORAL of HASS's alignment.
PAIRS = (
    ("hass", "eagle"), ("hass-alignment", "eagle"), ("hass", "hass-alignment"), ("coral", "hass-alignment"),
    ("coral", "hass"), ("coral", "eagle"),
    ("csra-one-step", "eagle"), ("coral-2-steps", "hass-alignment-2-steps"),
    ("coral-4-steps", "hass-alignment-4-steps"), ("coral-2-steps", "hass-alignment-4-steps"),
)  # fmt: skip
Tokens = dict[str, list[float]]  # 'tree, T temperature' -> at every context


def tokens_of(draft: Path, num_contexts: int, arguments: argparse.Namespace) -> Tokens:
    """Expected tokens a pass at every context, by tree and temperature."""
    torch.set_num_threads(1)
    seed: int = arguments.context_seed
    bench = Bench(arguments.model, draft, seed)
    texts = contexts(bench.engine.pair.tokenizer, arguments.text, count=num_contexts, tokens=CONTEXT_TOKENS, seed=seed)
    cells = {f"{name}, T {temperature:g}": Cell() for name in TREES for temperature in TEMPERATURES}
    for index, ids in enumerate(texts):
        bench.start(ids)
        for (name, tree), temperature in itertools.product(TREES.items(), TEMPERATURES):
            sampling = SamplingSettings(temperature=temperature)
            bench.step(tree, sampling, bench.drafter(tree, sampling), cells[f"{name}, T {temperature:g}"], index)
    bench.engine.close()
    return {name: cell.tokens for name, cell in cells.items()}


def accept(drafts: Mapping[str, Path], num_contexts: int, arguments: argparse.Namespace) -> dict[str, Tokens]:
    """Of all drafts, some at a time; what was found before is kept, and the first contexts are always the same."""
    kept = arguments.out / "accept.json"
    found: dict[str, Tokens] = json.loads(kept.read_text()) if kept.exists() else {}
    missing = [name for name in drafts if name not in found or len(found[name]["chain, T 0"]) < num_contexts]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        waiting = {name: pool.submit(tokens_of, drafts[name], num_contexts, arguments) for name in missing}
        for name, result in waiting.items():
            found[name] = result.result()
            kept.write_text(json.dumps(found))
            print(f"{name}: done", file=sys.stderr)
    return {name: {cell: found[name][cell][:num_contexts] for cell in found[name]} for name in drafts}


def print_acceptance(found: Mapping[str, Tokens], groups: Mapping[str, Sequence[int]]) -> None:
    """A row a method, means over seeds with 95 % intervals; then paired differences of methods."""
    cells = list(next(iter(found.values())))
    means = {  # method -> [seeds, cells, contexts]
        method: torch.tensor([[found[f"{method}-{seed}"][cell] for cell in cells] for seed in seeds]).double()
        for method, seeds in groups.items()
    }
    table = [["tokens a pass", *cells]]
    for method, values in means.items():
        table.append([f"{method}, {len(values)} seeds", *(_over_seeds(column) for column in values.mean(-1).T)])
    if DRAFT in found:
        drafts = torch.tensor([found[DRAFT][cell] for cell in cells]).double()
        table.append([DRAFT, *(f"{value:.2f}" for value in drafts.mean(-1).tolist())])
    print("\n".join(markdown(table)))
    print("\ndifferences at the same contexts and seeds, 95 % intervals over contexts")
    table = [["tokens a pass", *cells]]
    for better, worse in PAIRS:
        if better in means and worse in means:
            both = sorted({*groups[better]} & {*groups[worse]})
            sides = [means[name][[groups[name].index(seed) for seed in both]].mean(0) for name in (better, worse)]
            table.append(
                [f"{better} - {worse}, {len(both)} seeds", *(in_words(row.tolist()) for row in sides[0] - sides[1])]
            )
    print("\n".join(markdown(table)))


def _over_seeds(values: Tensor) -> str:
    """Mean and half the 95 % interval of Student's t over seeds [seeds]."""
    if values.shape[0] < 2:
        return f"{float(values.mean()):.2f}"
    half = float(stats.t.ppf(0.975, values.shape[0] - 1)) * float(values.std()) / values.shape[0] ** 0.5
    return f"{float(values.mean()):.2f} ± {half:.2f}"
