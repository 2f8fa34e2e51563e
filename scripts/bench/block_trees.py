"""Trees against chains for drafters that guess a block in one pass, over a slow link.

    python -m scripts.papers.train_published_drafts OUT
    python -m scripts.bench.block_trees OUT --link-gib-per-s 0.5 0.1

All layers of the built-in target stream, each for its bytes' time at such a link, so that a pass takes about as long
for few rows as for many. Every drafter that is in OUT decodes the same prompts greedily with: no trees, chains of seven
and trees of 8 and 64 nodes, chains and trees that tune themselves (nothing is looked up in either). All take turns;
the first prompt does not count. tokens/s of the prompts' own steps, tokens a step, nodes, and the share of growth.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import offload.loaders
from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.placement.pair_setup import set_up
from edgespec.placement.run_config import resolve_run_config
from edgespec.tuning.step import StepResult
from scripts.papers.tables.paper_table import markdown
from scripts.situations import GIB, PROMPT_TOKENS, SEED, cut_texts, held_out_halves, throttle_edgespec

TARGET = DEMO_FOLDER / "target"
CHAIN, TREE = TreeSettings(policy="chain", draft_tokens=7, lookup=False), TreeSettings(lookup=False)
WAYS: dict[str, tuple[TreeSettings, bool]] = {
    "no trees": (TreeSettings(policy="none"), False),
    "chain of 7": (CHAIN, False),
    "tree of 8": (TreeSettings(size=8, depth=7, lookup=False), False),
    "tree of 64": (TreeSettings(size=64, depth=7, lookup=False), False),
    "chains, tuned": (CHAIN, True),
    "trees, tuned": (TREE, True),
}


def open_engine(draft: Path, way: str, arguments: argparse.Namespace) -> Engine:
    """An engine of the built-in target, whose layers all stream, with this drafter and these trees."""
    tree, is_tuned = WAYS[way]
    pair = open_pair(TARGET, draft)
    options: dict[str, Any] = {
        "limits": MemoryLimits(max_resident_layers=0),
        "threads": 1,
        "context_tokens": PROMPT_TOKENS + 16 + arguments.n,
    }
    run_config = resolve_run_config(pair.target, pair.max_context, draft=pair.draft, **options)
    return Engine(set_up(pair, run_config, tree, is_tuned=is_tuned), self_check=False, draft_check=False)


def steps_of(draft: Path, prompts: list[str], arguments: argparse.Namespace) -> dict[str, list[StepResult]]:
    """The steps of all texts but the first, by way; all ways write the same texts."""
    found: dict[str, list[StepResult]] = defaultdict(list)
    with ExitStack() as stack:
        engines = {way: stack.enter_context(open_engine(draft, way, arguments)) for way in WAYS}
        for number, prompt in enumerate(prompts):
            options: dict[str, Any] = {"max_new_tokens": arguments.n, "temperature": 0.0, "ignore_eos": True}
            results = {way: engine.generate(prompt, **options) for way, engine in engines.items()}
            assert len({result.token_ids for result in results.values()}) == 1
            for way, result in results.items() if number else ():
                found[way] += [step for step in result.steps if not step.is_prefill]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--link-gib-per-s", type=float, nargs="+", default=[0.5, 0.1])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("-n", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts = cut_texts(held_out_halves()[1], count=arguments.prompts, tokens=PROMPT_TOKENS, seed=SEED)
    load, rows = offload.loaders.CpuLoader.load, list[dict[str, Any]]()
    for link in arguments.link_gib_per_s:
        offload.loaders.CpuLoader.load = load  # type: ignore[method-assign]
        throttle_edgespec(link * GIB)
        for folder in sorted(path.parent for path in arguments.out.glob("d*/config.json")):
            for way, steps in steps_of(folder, prompts, arguments).items():
                grow_s, seconds = sum(step.grow_s for step in steps), sum(step.total_s for step in steps)
                tokens = sum(len(step.tokens) for step in steps)
                rows.append({
                    "link": link, "draft": folder.name, "way": way, "tokens_per_s": tokens / seconds,
                    "tokens_a_step": tokens / len(steps), "nodes": sum(step.num_drafted for step in steps) / len(steps),
                    "growth": grow_s / seconds, "step_ms": 1e3 * seconds / len(steps),
                })  # fmt: skip
    table = [["GiB/s", "drafter", *WAYS]]
    for link, draft in dict.fromkeys((row["link"], row["draft"]) for row in rows):
        own = [row for row in rows if (row["link"], row["draft"]) == (link, draft)]
        table.append([f"{link:g}", draft, *(_in_words(row) for row in own)])
    print("\n".join(markdown(table)))
    print(json.dumps({"prompts": arguments.prompts, "new_tokens": arguments.n, "rows": rows}))


def _in_words(row: dict[str, Any]) -> str:
    return (
        f"{row['tokens_per_s']:.1f} ({row['tokens_a_step']:.2f} of {row['nodes']:.0f} nodes, "
        f"{row['step_ms']:.0f} ms, growth {row['growth']:.2f})"
    )


if __name__ == "__main__":
    main()
