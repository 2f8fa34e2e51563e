"""The papers' figures and tables, asked again of a pair.

    python -m scripts.papers                        what there is
    python -m scripts.papers opt-tree-5 dyspec-2    some of them
    python -m scripts.papers all --contexts 200

Contexts are those of scripts/compare_policies.py: held-out modules of the standard library, cut at random points.
Intervals are 95 % bootstraps over contexts. docs/papers.md has what came out, beside the papers' own numbers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts.compare_policies import Bench, contexts
from scripts.paper_tables import depth, dyspec, mcsd, opt_tree
from scripts.paper_tables.paper_table import Context, PaperTable

MODULES = (dyspec, opt_tree, mcsd, depth)
TABLES: dict[str, PaperTable] = {table.name: table for module in MODULES for table in module.TABLES}


def run_part(part: int, names: list[str], arguments: argparse.Namespace) -> dict[int, list[Any]]:
    """What every table notes at the contexts of one process."""
    torch.set_num_threads(1)
    bench = Bench(arguments.model, arguments.draft_model, arguments.seed)
    texts = contexts(bench.engine.pair.tokenizer, arguments.text, count=arguments.contexts,
                     tokens=arguments.context_tokens, seed=arguments.seed)  # fmt: skip
    found: dict[int, list[Any]] = {}
    started = time.perf_counter()
    for number in range(part, len(texts), arguments.processes):
        bench.start(texts[number])
        context = Context(bench=bench, number=number, seed=arguments.seed)
        found[number] = [TABLES[name].visit(context) for name in names]
        if part == 0:
            print(f"{number + 1} of {len(texts)} contexts, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return found


def main() -> None:
    """Visit every context once for all tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="names, or all; without any, they are listed")
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--text", type=Path, help="folder of text files to cut contexts from")
    parser.add_argument("--contexts", type=int, default=200)
    parser.add_argument("--context-tokens", type=int, default=192)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    unknown = set(arguments.tables) - {*TABLES, "all"}
    if unknown:
        raise SystemExit(f"no table is called {', '.join(sorted(unknown))}; there are: {', '.join(TABLES)}")
    if not arguments.tables:
        for table in TABLES.values():
            print(f"{table.name:14} {table.source}: {table.claim}")
        return
    names = list(TABLES) if "all" in arguments.tables else arguments.tables
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        parts = pool.starmap(run_part, [(part, names, arguments) for part in range(arguments.processes)])
    noted = [notes for _, notes in sorted(item for part in parts for item in part.items())]
    for name, column in zip(names, zip(*noted, strict=True), strict=True):
        print(f"\n{TABLES[name].source}: {TABLES[name].claim}.\n")
        print("\n".join(TABLES[name].show(column)))


if __name__ == "__main__":
    main()
