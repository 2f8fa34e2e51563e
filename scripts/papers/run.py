"""The papers' figures and tables, asked again of a pair.

    python -m scripts.papers.run                        what there is
    python -m scripts.papers.run opt-tree-5 dyspec-2    some of them
    python -m scripts.papers.run all --contexts 200     all that fit no models
    python -m scripts.papers.run coral-3 --out FOLDER   one that fits models first, and goes on where it was stopped

Tables that fit models first are of the built-in pair, and have --contexts and --processes alone of the options.
Contexts are those of compare_policies: held-out modules of the standard library, cut at random points.
Intervals are 95 % bootstraps over contexts. docs/papers.md has what came out, beside the papers' own numbers.
"""

import argparse
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.papers.compare_policies import add_context_options, visit_contexts
from scripts.papers.tables import c2t, depth, dyspec, fitted, mcsd, opt_tree, sequoia, specinfer
from scripts.papers.tables.paper_table import Context, PaperTable

MODULES = (dyspec, opt_tree, mcsd, depth, c2t, sequoia, specinfer)
TABLES: dict[str, PaperTable] = {table.name: table for module in MODULES for table in module.TABLES}
FITTED = {table.name: table for table in fitted.TABLES}


def run_part(part: int, names: Sequence[str], arguments: argparse.Namespace) -> dict[int, list[Any]]:
    """What every table notes at the contexts of one process."""
    found: dict[int, list[Any]] = {}
    for number, bench in visit_contexts(part, arguments):
        context = Context(bench=bench, number=number, seed=arguments.seed)
        found[number] = [TABLES[name].visit(context) for name in names]
    return found


def show_tables(names: Sequence[str], arguments: argparse.Namespace) -> None:
    """Visit every context once for all of these tables, and print them."""
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        parts = pool.starmap(run_part, [(part, names, arguments) for part in range(arguments.processes)])
    noted = [notes for _, notes in sorted(item for part in parts for item in part.items())]
    for name, column in zip(names, zip(*noted, strict=True), strict=True):
        print(heading(TABLES[name]))
        print("\n".join(TABLES[name].show(column)))


def heading(table: PaperTable | fitted.FittedTable) -> str:
    """What stands above a table."""
    return f"\n{table.source}: {table.claim}.\n"


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="names, or all; without any, they are listed")
    parser.add_argument(
        "--out", type=Path, default=Path("paper-models"), help="folder of models that are fitted [%(default)s]"
    )
    add_context_options(parser)
    arguments = parser.parse_args()
    unknown = set(arguments.tables) - {*TABLES, *FITTED, "all"}
    if unknown:
        raise SystemExit(f"no table is called {', '.join(sorted(unknown))}; there are: {', '.join([*TABLES, *FITTED])}")
    if not arguments.tables:
        for table in (*TABLES.values(), *FITTED.values()):
            print(f"{table.name:20} {table.source}: {table.claim}")
        return
    fitted_names = [name for name in dict.fromkeys(arguments.tables) if name in FITTED]
    if fitted_names and any((arguments.model, arguments.draft_model, arguments.text)):
        raise SystemExit(f"{', '.join(fitted_names)}: asked of the built-in pair alone; leave out -m, -md and --text")
    names = list(TABLES) if "all" in arguments.tables else [name for name in arguments.tables if name in TABLES]
    if names:
        show_tables(names, arguments)
    for name in fitted_names:
        print(heading(FITTED[name]), flush=True)
        FITTED[name].run(arguments.out, contexts=arguments.contexts, processes=arguments.processes)


if __name__ == "__main__":
    main()
