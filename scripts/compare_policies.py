"""Every policy on the same contexts: tokens per pass, and what growing the trees costs.

    python -m scripts.compare_policies --contexts 200 --figure docs/policies.png
    python -m scripts.compare_policies --follow 12 --sizes 64          whole generations instead

Contexts are held-out modules of the standard library (those that the built-in pair was not fitted on;
--text FOLDER for another pair), cut at random points: no text that the model made itself, whose loops
flatter every method. At each context every policy grows a tree for every budget and temperature, in
alternation. Tokens per pass are the expectation over the verifier's own draws, computed exactly from p
and q of the tree's nodes; what varies is contexts, and the noise of sampled children. Intervals are 95 %
bootstraps over contexts. Policies that have no budget of their own get shapes or thresholds of about
the size: `dyspec threshold` and `c2t` are given the threshold that makes trees of the budget on average
(at most 768 nodes), found on contexts of its own.

--follow N decodes N prompts with the engine instead, and counts tokens per pass as they come.
Prints a table and one JSON line, the same for the same seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.draft.open_drafter import open_drafter
from edgespec.grow.order import depth_first_order, num_blocks
from edgespec.grow.policies import make_grow, open_policy
from edgespec.model.target import Target
from edgespec.pair.pair import open_pair
from edgespec.train.records import expected_tokens
from edgespec.tree.token_tree import TokenTree, ancestors_mask
from edgespec.verify.rows import TargetRows
from scripts.fit_demo_models import held_out_halves

DEPTH = 24
SPECINFER = {16: (2, 1, 1, 1, 1, 1, 1, 1), 64: (4, 2, 1, 1, 1, 1, 1, 1), 256: (8, 2, 2, 1, 1, 1, 1, 1),
             768: (8, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1)}  # fmt: skip
MCSD = {16: (2, 2, 1, 1), 64: (4, 2, 2, 1, 1), 256: (8, 4, 2, 1, 1), 768: (16, 4, 2, 1, 1, 1)}
FORKS = {16: (3, 5), 64: (12, 5), 256: (32, 8), 768: (64, 12)}
CALIBRATED = {"dyspec threshold": (1e-6, 0.9), "c2t": (1e-6, 0.9)}
ANY_THRESHOLDS = dict.fromkeys(CALIBRATED, 0.02)
NUM_BOOTSTRAPS = 2000
LARGE_SIZE = 512


def entrants(size: int, thresholds: dict[str, float]) -> dict[str, TreeSettings]:
    """Every policy at a budget: name -> settings."""
    nearest = min(SPECINFER, key=lambda known: abs(known - size))
    limits: dict[str, Any] = {"size": size, "depth": DEPTH}
    return {
        "adaptive sampled": TreeSettings(policy="adaptive", draw="sampled", **limits),
        "adaptive chosen": TreeSettings(policy="adaptive", draw="chosen", **limits),
        "dyspec": TreeSettings(policy="dyspec", **limits),
        "dyspec threshold": TreeSettings(
            policy="dyspec", size=768, depth=DEPTH, threshold=thresholds["dyspec threshold"]
        ),
        "opt-tree": TreeSettings(policy="opt-tree", **limits),
        "eagle2": TreeSettings(policy="eagle2", **limits, max_children=10),
        "c2t": TreeSettings(
            policy="c2t", size=768, depth=DEPTH, confidence=thresholds["c2t"], max_children=max(15, size // 4)
        ),
        "sequoia": TreeSettings(policy="sequoia", draw="sampled", **limits),
        "sequoia chosen": TreeSettings(policy="sequoia", draw="chosen", **limits),
        "specinfer": TreeSettings(policy="specinfer", branching=SPECINFER[nearest]),
        "mcsd": TreeSettings(policy="mcsd", branching=MCSD[nearest]),
        "mcsd fork": TreeSettings(policy="mcsd", fork=FORKS[nearest]),
        "chain": TreeSettings(policy="chain", draft_tokens=min(size, DEPTH)),
    }  # fmt: skip


def chosen_entrants(size: int, thresholds: dict[str, float], arguments: argparse.Namespace) -> dict[str, TreeSettings]:
    """Those that were asked for, with every draft temperature that was."""
    found = {}
    for name, settings in entrants(size, thresholds).items():
        if not arguments.only or any(part in name for part in arguments.only):
            for at in arguments.draft_temps or [None]:
                label = name if at is None else f"{name} @{at:g}"
                found[label] = replace(settings, draft_temperature=at)
    return found


@dataclass
class CountingDrafter:
    """Passes everything on to a drafter, and counts."""

    drafter: LanguageModelDrafter
    calls: int = 0
    nodes: int = 0

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Q after nodes."""
        self.calls += 1
        self.nodes += tokens.shape[0]
        return self.drafter.expand(tokens, parent_rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)


@dataclass
class Cell:
    """What one policy did at one budget and temperature, an entry a context."""

    contexts: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    draft_calls: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    grow_s: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    blocks_depth_first: list[int] = field(default_factory=list)


class Bench:
    """A pair, and the text that it is at."""

    def __init__(self, model: Path | None, draft: Path | None, seed: int) -> None:
        pair = open_pair(model, draft)
        self.engine = Engine.from_pair(pair, tree=TreeSettings(policy="dyspec", size=768), self_check=False)
        assert self.engine.draft_model is not None
        self.target = Target(self.engine.target_model)
        self.seed = seed

    def start(self, ids: list[int]) -> None:
        """Take a text whose last token is the root."""
        self.ids, self.root = ids, ids[-1]
        self.target.prefill(torch.tensor(ids[:-1]), capacity=len(ids) + 800)

    def drafter(self, settings: TreeSettings, sampling: SamplingSettings) -> LanguageModelDrafter:
        """A drafter at the same text."""
        assert self.engine.draft_model is not None
        drafter = open_drafter(
            self.engine.draft_model,
            self.engine.target_model,
            sampling=settings.draft_sampling(sampling),
            tree_rows=1600,
        )
        drafter.prefill(torch.tensor(self.ids[:-1]), capacity=len(self.ids) + 1600)
        return drafter

    def step(
        self,
        settings: TreeSettings,
        sampling: SamplingSettings,
        drafter: LanguageModelDrafter,
        cell: Cell,
        context: int,
    ) -> None:
        """Grow one tree and see what the target makes of it."""
        # Of text, because the hash of a string is another in every process.
        of_step = f"{self.seed} {context} {settings.policy} {settings.size}"
        generator = torch.Generator().manual_seed(random.Random(of_step).getrandbits(31))
        drafter.sampling = settings.draft_sampling(sampling)  # one drafter serves all policies at a text
        counting = CountingDrafter(drafter)
        grow = _grower(settings, sampling)(counting, self.target.vocab, generator)
        started = time.perf_counter()
        tree = grow(self.root, DEPTH)
        cell.grow_s.append(time.perf_counter() - started)
        rows = TargetRows(self.target.look(tree), self.target.logits, sampling, vocab=self.target.vocab)
        cell.contexts.append(context)
        cell.tokens.append(expected_tokens(tree, rows.all_probs()))
        cell.nodes.append(tree.num_nodes - 1)
        cell.draft_calls.append(counting.calls)
        cell.drafted.append(counting.nodes)
        before, after = _blocks(tree)
        cell.blocks.append(before)
        cell.blocks_depth_first.append(after)
        drafter.rewind()


@functools.cache
def _policy(settings: TreeSettings) -> Any:
    return open_policy(settings)


def _grower(settings: TreeSettings, sampling: SamplingSettings) -> Any:
    return lambda drafter, vocab, generator: make_grow(
        _policy(settings), drafter, sampling=sampling, vocab=vocab, device=torch.device("cpu"), generator=generator
    )


def _blocks(tree: TokenTree) -> tuple[int, int]:
    """Non-empty attention blocks of the tree's own mask, as grown and depth first."""
    mask = ancestors_mask(tree.parents)
    order = depth_first_order(tree.parents)
    return num_blocks(mask), num_blocks(mask[order][:, order])


def contexts(tokenizer: Any, folder: Path | None, *, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Texts of `tokens` tokens that end at random points of held-out files."""
    if folder is None:
        texts = held_out_halves()[1]
    else:
        texts = [
            path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.rglob("*")) if path.is_file()
        ]
    streams = [ids for ids in (tokenizer.encode(text, verbose=False) for text in texts) if len(ids) > tokens + 1]
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        ids = draw.choices(streams, weights=[len(stream) for stream in streams])[0]
        end = draw.randrange(tokens, len(ids))
        found.append(ids[end - tokens : end])
    return found


def calibrate(bench: Bench, texts: list[list[int]], size: int, sampling: SamplingSettings, name: str) -> float:
    """The threshold that makes trees of `size` nodes on average."""
    low, high = CALIBRATED[name]
    for _ in range(7):
        middle = (low * high) ** 0.5
        cell = Cell()
        settings = entrants(size, dict.fromkeys(CALIBRATED, middle))[name]
        for index, ids in enumerate(texts):
            bench.start(ids)
            bench.step(settings, sampling, bench.drafter(settings, sampling), cell, index)
        low, high = (middle, high) if statistics.mean(cell.nodes) > size else (low, middle)
    return high


def run_part(part: int, arguments: argparse.Namespace, thresholds: dict[str, dict[str, float]]) -> dict[str, Cell]:
    """The contexts of one process."""
    torch.set_num_threads(1)
    bench = Bench(arguments.model, arguments.draft_model, arguments.seed)
    texts = contexts(bench.engine.pair.tokenizer, arguments.text, count=arguments.contexts,
                     tokens=arguments.context_tokens, seed=arguments.seed)  # fmt: skip
    cells: dict[str, Cell] = defaultdict(Cell)
    started = time.perf_counter()
    for context in range(part, len(texts), arguments.processes):
        bench.start(texts[context])
        for temperature in arguments.temps:
            sampling = SamplingSettings(temperature=temperature, top_p=arguments.top_p, top_k=arguments.top_k)
            drafter = None
            for size in arguments.sizes:
                if size >= LARGE_SIZE and context >= (arguments.large_contexts or arguments.contexts):
                    continue
                for name, settings in chosen_entrants(size, thresholds[f"{temperature} {size}"], arguments).items():
                    drafter = drafter or bench.drafter(settings, sampling)
                    bench.step(settings, sampling, drafter, cells[f"{temperature}|{size}|{name}"], context)
        if part == 0:
            print(f"{context + 1} of {len(texts)} contexts, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return dict(cells)


def find_thresholds(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """For every temperature and size: name -> threshold."""
    bench = Bench(arguments.model, arguments.draft_model, arguments.seed)
    texts = contexts(bench.engine.pair.tokenizer, arguments.text, count=arguments.calibration,
                     tokens=arguments.context_tokens, seed=arguments.seed + 1)  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    for temperature in arguments.temps:
        sampling = SamplingSettings(temperature=temperature, top_p=arguments.top_p, top_k=arguments.top_k)
        for size in arguments.sizes:
            asked = {name.rsplit(" @", 1)[0] for name in chosen_entrants(size, ANY_THRESHOLDS, arguments)}
            found[f"{temperature} {size}"] = ANY_THRESHOLDS | {
                name: calibrate(bench, texts, size, sampling, name) for name in CALIBRATED if name in asked
            }
    return found


def interval(values: Tensor, generator: torch.Generator) -> tuple[float, float, float]:
    """Mean and the bounds of its 95 % interval, by bootstrap over values [n]."""
    index = torch.randint(values.shape[0], (NUM_BOOTSTRAPS, values.shape[0]), generator=generator)
    means = values[index].mean(1)
    return float(values.mean()), float(means.quantile(0.025)), float(means.quantile(0.975))


def summarise(cells: dict[str, Cell], *, with_times: bool) -> list[dict[str, Any]]:
    """A row a cell, with the paired difference to the best cell of the same budget and temperature."""
    generator = torch.Generator().manual_seed(0)
    tokens = {}
    for key, cell in cells.items():
        order = torch.tensor(cell.contexts).argsort()
        tokens[key] = torch.tensor(cell.tokens, dtype=torch.float64)[order]
    best: dict[str, str] = {}
    for key in cells:
        group = key.rsplit("|", 1)[0]
        if group not in best or tokens[key].mean() > tokens[best[group]].mean():
            best[group] = key
    rows = []
    for key, cell in cells.items():
        temperature, size, name = key.split("|")
        mean, low, high = interval(tokens[key], generator)
        behind = interval(tokens[best[f"{temperature}|{size}"]] - tokens[key], generator)
        times = {"grow_s": statistics.median(cell.grow_s)} if with_times else {}
        rows.append(
            {
                **times,
                "temperature": float(temperature),
                "size": int(size),
                "policy": name,
                "contexts": len(cell.tokens),
                "tokens_per_pass": mean,
                "interval": [low, high],
                "behind_best": behind[0],
                "behind_best_interval": [behind[1], behind[2]],
                "nodes": statistics.mean(cell.nodes),
                "draft_calls": statistics.mean(cell.draft_calls),
                "drafted": statistics.mean(cell.drafted),
                "blocks": statistics.mean(cell.blocks),
                "blocks_depth_first": statistics.mean(cell.blocks_depth_first),
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Tokens per pass with intervals; * marks what the best one's paired interval does not exclude."""
    print(f"{'T':>4}{'size':>5} {'policy':18}{'tok/pass':>9}{'95 %':>14}  {'behind best':>11}{'nodes':>7}{'calls':>6}"
          f"{'drafted':>8}{'blocks':>7}{'depth-first':>12}{'grow ms' if 'grow_s' in rows[0] else '':>8}")  # fmt: skip
    for row in rows:
        low, high = row["interval"]
        tie = "*" if row["behind_best_interval"][0] <= 0 else " "
        print(
            f"{row['temperature']:>4g}{row['size']:>5} {row['policy']:18}{row['tokens_per_pass']:>8.2f}{tie}"
            f"{low:>7.2f}-{high:<6.2f}  {row['behind_best']:>11.2f}{row['nodes']:>7.0f}{row['draft_calls']:>6.1f}"
            f"{row['drafted']:>8.0f}{row['blocks']:>7.0f}{row['blocks_depth_first']:>12.0f}"
            + (f"{1000 * row['grow_s']:>8.1f}" if "grow_s" in row else "")
        )


def draw_figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per pass against budget, a panel a temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = sorted({row["temperature"] for row in rows})
    figure, panels = pyplot.subplots(1, len(temperatures), figsize=(4.2 * len(temperatures), 4.2), squeeze=False)
    names = sorted({row["policy"] for row in rows})
    colours = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        for name in names:
            line = [row for row in rows if row["policy"] == name and row["temperature"] == temperature]
            sizes = [row["size"] for row in line]
            means = [row["tokens_per_pass"] for row in line]
            bounds = list(zip(*(row["interval"] for row in line), strict=True))
            width = 2.4 if name.startswith("adaptive") else 1.2
            panel.plot(sizes, means, marker="o", markersize=3, linewidth=width, color=colours[name], label=name)
            panel.fill_between(sizes, *bounds, color=colours[name], alpha=0.1, linewidth=0)
        panel.set(xscale="log", xlabel="nodes", title=f"temperature {temperature:g}")
        panel.set_xticks(sorted({row["size"] for row in rows}), labels=sorted({row["size"] for row in rows}))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens per pass")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=7, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=130)


def follow(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole generations by the engine, from contexts."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    for size in arguments.sizes:
        for name, settings in chosen_entrants(size, ANY_THRESHOLDS, arguments).items():
            if name in CALIBRATED:
                continue
            with Engine.from_pair(
                open_pair(arguments.model, arguments.draft_model), tree=settings, self_check=False
            ) as engine:
                texts = contexts(engine.pair.tokenizer, arguments.text, count=arguments.follow,
                                 tokens=arguments.context_tokens, seed=arguments.seed)  # fmt: skip
                for temperature in arguments.temps:
                    results = [
                        engine.generate(
                            ids, max_new_tokens=96, sampling=SamplingSettings(temperature=temperature), seed=index
                        )
                        for index, ids in enumerate(texts)
                    ]
                    values = torch.tensor([result.tokens_per_pass or 1.0 for result in results], dtype=torch.float64)
                    mean, low, high = interval(values, generator)
                    rows.append({"temperature": temperature, "size": size, "policy": name, "texts": len(results),
                                 "tokens_per_pass": mean, "interval": [low, high]})  # fmt: skip
    rows.sort(key=lambda row: (row["temperature"], row["size"]))
    for row in rows:
        print(f"{row['temperature']:>4g}{row['size']:>5} {row['policy']:18}{row['tokens_per_pass']:>8.2f}"
              f"{row['interval'][0]:>8.2f}-{row['interval'][1]:.2f}")  # fmt: skip
    return rows


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--text", type=Path, help="folder of text files to cut contexts from")
    parser.add_argument("--contexts", type=int, default=200)
    parser.add_argument("--large-contexts", type=int, help=f"fewer of them for {LARGE_SIZE} nodes and more [all]")
    parser.add_argument("--context-tokens", type=int, default=192)
    parser.add_argument("--calibration", type=int, default=8, help="contexts that thresholds are found on")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 768])
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--draft-temps", type=float, nargs="+", help="each policy with each [its own]")
    parser.add_argument("--only", nargs="+", help="policies whose name contains one of these")
    parser.add_argument("--follow", type=int, default=0, help="texts to decode instead")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", action="store_true", help="milliseconds of growth too, which no two runs share")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.follow:
        print(json.dumps({"rows": follow(arguments)}))
        return
    thresholds = find_thresholds(arguments)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        parts = pool.starmap(run_part, [(part, arguments, thresholds) for part in range(arguments.processes)])
    cells: dict[str, Cell] = {}
    for part in parts:
        for key, cell in part.items():
            whole = cells.setdefault(key, Cell())
            for name, values in vars(cell).items():
                getattr(whole, name).extend(values)
    rows = summarise(cells, with_times=arguments.times)
    print_table(rows)
    if arguments.figure:
        draw_figure(rows, arguments.figure)
    print(json.dumps({"rows": rows, "thresholds": thresholds, "seed": arguments.seed}))


if __name__ == "__main__":
    main()
