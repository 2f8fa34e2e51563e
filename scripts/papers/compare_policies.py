"""Every policy on the same contexts: tokens per pass, and how far the others are behind adaptive trees.

    python -m scripts.papers.compare_policies --contexts 200 --figure docs/policies.png
    python -m scripts.papers.compare_policies --top-p 0.95 --temps 0.8

Contexts are held-out modules of the standard library (those that the built-in pair was not fitted on;
--text FOLDER for another pair), cut at random points: no text that the model made itself, whose loops
flatter every method. At each context every policy grows a tree for every budget and temperature.

Which coupled children are accepted is decided by the noise: the target continues the context with --noises
noises, the same for all policies, and a tree's tokens per pass are as many as it has of that text; chosen
and greedy trees are valued by the same texts. Of sampled children the tokens are the expectation over the
verifier's own draws, computed exactly from p and q of one tree's nodes. Trees of most policies are nested, so that
one of the largest budget is all of them; `c2t` is given its most confident nodes, and fixed shapes are of about
the size.

Contexts vary far more than policies do, so that a second column has the difference to adaptive trees at the same
contexts. Intervals are 95 % bootstraps over contexts.

Prints a table and one JSON line, the same for the same seed.
"""

import argparse
import functools
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.decode.loop import decode
from edgespec.decode.sequence import TextSettings
from edgespec.decode.start import start_sequence
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.grow.batched import grown
from edgespec.grow.classifier import Classifier, default_classifier
from edgespec.grow.growing import best_nodes
from edgespec.grow.policies import OpenPolicy, make_grow, open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.model.target import Target
from edgespec.pair.pair import open_pair
from edgespec.sampling.noise import TextNoise
from edgespec.train.records import node_values
from edgespec.tree.token_tree import TokenTree, depths
from edgespec.verify.rows import TargetRows
from scripts.situations import held_out_halves

CPU = torch.device("cpu")
DEPTH = 24
SPECINFER = {16: (2, 1, 1, 1, 1, 1, 1, 1), 64: (4, 2, 1, 1, 1, 1, 1, 1), 256: (8, 2, 2, 1, 1, 1, 1, 1),
             768: (8, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1)}  # fmt: skip
MCSD = {16: (2, 2, 1, 1), 64: (4, 2, 2, 1, 1), 256: (8, 4, 2, 1, 1), 768: (16, 4, 2, 1, 1, 1)}
REFERENCE = "adaptive"
IN_FIGURE = ("adaptive", "sequoia", "opt-tree", "eagle2", "dyspec", "chain")
NUM_BOOTSTRAPS = 2000
READ_ON = 5  # tokens that the target continues a context with at once
NOISES_PER_CONTEXT = 10  # keys that a context has to itself


def nested_entrants(size: int) -> dict[str, TreeSettings]:
    """Policies whose trees of a smaller budget are part of those of `size` nodes: name -> settings."""
    limits: dict[str, Any] = {"size": size, "depth": DEPTH}
    found = {
        "adaptive": TreeSettings(policy="adaptive", **limits),
        "dyspec": TreeSettings(policy="dyspec", **limits),
        "chain": TreeSettings(policy="chain", draft_tokens=DEPTH),
    }
    for name, others in {"opt-tree": {}, "eagle2": {"max_children": 10},
                         "c2t": {"max_children": max(15, size // 4), "confidence": 1e-6}}.items():  # fmt: skip
        found[name] = TreeSettings(policy=name, **limits, **others)  # type: ignore[arg-type]
        found[f"{name} chosen"] = replace(found[name], draw="chosen")
    return found


def shaped_entrants(size: int) -> dict[str, TreeSettings]:
    """Policies whose shapes are other ones at every budget: name -> settings."""
    nearest = min(SPECINFER, key=lambda known: abs(known - size))
    return {
        "sequoia": TreeSettings(policy="sequoia", size=size, depth=DEPTH),
        "sequoia coupled": TreeSettings(policy="sequoia", draw="coupled", size=size, depth=DEPTH),
        "specinfer": TreeSettings(policy="specinfer", branching=SPECINFER[nearest]),
        "mcsd": TreeSettings(policy="mcsd", branching=MCSD[nearest]),
    }


def asked_for(entrants: dict[str, TreeSettings], arguments: argparse.Namespace) -> dict[str, TreeSettings]:
    """Those that were asked for, with every draft temperature that was."""
    found = {}
    for name, settings in entrants.items():
        if not arguments.only or any(part in name for part in arguments.only):
            for at in arguments.draft_temps or [None]:
                label = name if at is None else f"{name} @{at:g}"
                found[label] = replace(settings, draft_temperature=at)
    return found


@dataclass
class Cell:
    """What one policy did at one budget and temperature, an entry a context."""

    contexts: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    nodes: list[float] = field(default_factory=list)

    def add(self, context: int, tokens: float, nodes: float) -> None:
        """Add what was found at a context."""
        self.contexts.append(context)
        self.tokens.append(tokens)
        self.nodes.append(nodes)


@functools.cache
def _policy(settings: TreeSettings) -> OpenPolicy:
    return open_policy(settings)


@dataclass(frozen=True, slots=True)
class Fits:
    """What is fitted on a pair; None is what is fitted on the built-in one."""

    acceptance: Path | None = None
    classifier: Path | None = None


class Bench:
    """A pair, what is fitted on it, and the text that it is at."""

    def __init__(
        self, model: Path | None, draft: Path | None, seed: int, *, num_noises: int = 4, fits: Fits | None = None
    ) -> None:
        fits = fits or Fits()
        self.acceptance = AcceptanceModel.load(fits.acceptance) if fits.acceptance else default_acceptance()
        self.classifier = Classifier.load(fits.classifier) if fits.classifier else default_classifier()
        pair = open_pair(model, draft)
        self.engine = Engine.from_pair(pair, tree=TreeSettings(policy="dyspec", size=768), self_check=False)
        assert self.engine.draft_model is not None
        self.target = Target(self.engine.target_model)
        self.seed, self.num_noises = seed, num_noises

    def start(self, ids: list[int]) -> None:
        """Take a text whose last token is the root."""
        self.ids, self.root = ids, ids[-1]
        self._texts: dict[tuple[SamplingSettings, int], list[int]] = {}  # that the target goes on with
        self._rewind()

    def _rewind(self) -> None:
        self.target.prefill(torch.tensor(self.ids[:-1]))

    def policy(self, settings: TreeSettings) -> OpenPolicy:
        """The policy, with what is fitted on this pair where it uses such and names no file."""
        policy = _policy(settings)
        if settings.acceptance is None:
            policy = policy.with_acceptance(self.acceptance)
        if policy.classifier is not None and settings.classifier is None:
            policy = replace(policy, classifier=self.classifier)
        return policy

    def drafter(self, settings: TreeSettings, sampling: SamplingSettings) -> LanguageModelDrafter:
        """A drafter at the same text."""
        assert self.engine.draft_model is not None
        drafter = open_drafter(self.engine.draft_model, self.target, sampling=settings.draft_sampling(sampling))
        drafter.begin(self.ids[:-1])
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
        ((tokens, nodes),) = self.values(settings, sampling, drafter, context, [settings.num_nodes])
        cell.add(context, tokens, nodes)

    def values(
        self,
        settings: TreeSettings,
        sampling: SamplingSettings,
        drafter: LanguageModelDrafter,
        context: int,
        sizes: Sequence[int],
    ) -> list[tuple[float, float]]:
        """The tokens a pass and the nodes of the trees' best nodes, so many as in `sizes`."""
        # Of text, because the hash of a string is another in every process.
        of_step = f"{self.seed} {context} {settings.policy} {settings.size}"
        generator = torch.Generator().manual_seed(random.Random(of_step).getrandbits(31))
        draw = self.policy(settings).draw
        is_followed = sampling.temperature == 0 or draw != "sampled"
        sums = torch.zeros(len(sizes), 2, dtype=torch.float64)
        keys = range(self.num_noises if is_followed and sampling.temperature > 0 else 1)
        for key in keys:
            if key == 0 or draw == "coupled":
                tree = self.grow(settings, sampling, drafter, context, key, generator)
            if is_followed:
                values = torch.zeros(tree.num_nodes, dtype=torch.float64)
                values[self.path(tree, sampling, context, key)] = 1.0
            else:
                values = node_values(tree, self.target_probs(tree, sampling)).double()
            scores = -depths(tree.parents).double() if tree.scores is None else tree.scores
            for index, size in enumerate(sizes):
                kept = best_nodes(scores, size + 1)
                sums[index] += torch.tensor([float(values[kept].sum()), kept.shape[0] - 1.0], dtype=torch.float64)
        return [(tokens, nodes) for tokens, nodes in (sums / len(keys)).tolist()]

    def grow(
        self,
        settings: TreeSettings,
        sampling: SamplingSettings,
        drafter: LanguageModelDrafter,
        context: int,
        key: int,
        generator: torch.Generator,
    ) -> TokenTree:
        """One tree below the text; `key` names the noise of coupled children, `generator` draws sampled ones."""
        drafter.sampling = settings.draft_sampling(sampling)  # one drafter serves all policies at a text
        draws = TextDraws(sampling=sampling, device=CPU, generator=generator, noise=self._noise(context, key))
        grow = make_grow(self.policy(settings), drafter, draws)
        tree = grown(grow(self.root, DEPTH), drafter)
        drafter.rewind()
        return tree

    def target_probs(self, tree: TokenTree, sampling: SamplingSettings) -> Tensor:
        """The target's p behind every node: [n, vocab]."""
        rows = TargetRows(self.target.look(tree), self.target.logits, sampling, vocab=self.target.vocab)
        return rows.all_probs()

    def _noise(self, context: int, key: int) -> TextNoise:
        noise = TextNoise(seed=self.seed, key=context * NOISES_PER_CONTEXT + key, vocab=self.target.vocab, device=CPU)
        noise.start(len(self.ids) - 1)
        return noise

    def path(self, tree: TokenTree, sampling: SamplingSettings, context: int, key: int) -> list[int]:
        """The nodes of the tree along the text that the target goes on with under that noise, the root first."""
        text = self._texts.setdefault((sampling, key), [])
        pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        children = {pair: node for node, pair in enumerate(pairs)}
        path: list[int | None] = [0]
        while path[-1] is not None:
            if len(path) > len(text):
                self._extend(text, sampling, self._noise(context, key))
            path.append(children.get((path[-1], text[len(path) - 1])))
        return [node for node in path if node is not None]

    def _extend(self, text: list[int], sampling: SamplingSettings, noise: TextNoise) -> None:
        """Let the target go on with a text behind the context, by as many tokens as trees usually have of it."""
        settings = TextSettings(sampling=sampling, max_new_tokens=READ_ON)
        plain, generator = _policy(TreeSettings(policy="none")), torch.Generator()
        draws = TextDraws(sampling=sampling, device=CPU, generator=generator, noise=noise)
        session = start_sequence(self.target, None, plain, settings, draws)
        text += [token for step in decode(session, [*self.ids, *text]) for token in step.tokens]
        self._rewind()


def contexts(tokenizer: Any, folder: Path | None, *, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Texts of `tokens` tokens that end at random points of held-out files."""
    if folder is None:
        texts = held_out_halves()[1]
    else:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    streams = [ids for ids in (tokenizer.encode(text, verbose=False) for text in texts) if len(ids) > tokens + 1]
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        ids = draw.choices(streams, weights=[len(stream) for stream in streams])[0]
        end = draw.randrange(tokens, len(ids))
        found.append(ids[end - tokens : end])
    return found


def visit_contexts(part: int, arguments: argparse.Namespace, *, num_noises: int = 1) -> Iterator[tuple[int, Bench]]:
    """The number of every context of one process, and a bench that is at it."""
    torch.set_num_threads(1)
    fits = Fits(arguments.acceptance, arguments.classifier)
    bench = Bench(arguments.model, arguments.draft_model, arguments.seed, num_noises=num_noises, fits=fits)
    texts = contexts(bench.engine.pair.tokenizer, arguments.text, count=arguments.contexts,
                     tokens=arguments.context_tokens, seed=arguments.seed)  # fmt: skip
    started = time.perf_counter()
    for number in range(part, len(texts), arguments.processes):
        bench.start(texts[number])
        yield number, bench
        if part == 0:
            print(f"{number + 1} of {len(texts)} contexts, {time.perf_counter() - started:.0f} s", file=sys.stderr)


def add_context_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `visit_contexts` reads."""
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--acceptance", type=Path, help="measured, of the pair [the built-in pair's]")
    parser.add_argument("--classifier", type=Path, help="C2T's, of the pair [the built-in pair's]")
    parser.add_argument("--text", type=Path, help="folder of text files to cut contexts from")
    parser.add_argument("--contexts", type=int, default=200)
    parser.add_argument("--context-tokens", type=int, default=192)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)


def run_part(part: int, arguments: argparse.Namespace) -> dict[str, Cell]:
    """The contexts of one process."""
    cells: dict[str, Cell] = defaultdict(Cell)
    sizes: list[int] = arguments.sizes
    for context, bench in visit_contexts(part, arguments, num_noises=arguments.noises):
        for temperature in arguments.temps:
            sampling = SamplingSettings(temperature=temperature, top_p=arguments.top_p, top_k=arguments.top_k)
            groups = [(sizes, nested_entrants(max(sizes))), *(([size], shaped_entrants(size)) for size in sizes)]
            drafter = None
            for of_group, entrants in groups:
                for name, settings in asked_for(entrants, arguments).items():
                    if temperature == 0 and settings.draw == "chosen":
                        continue  # there coupled children are chosen ones
                    drafter = drafter or bench.drafter(settings, sampling)
                    values = bench.values(settings, sampling, drafter, context, of_group)
                    for size, (tokens, nodes) in zip(of_group, values, strict=True):
                        cells[f"{temperature}|{size}|{name}"].add(context, tokens, nodes)
    return dict(cells)


def resampled_places(count: int, generator: torch.Generator) -> Tensor:
    """Which of so many contexts are drawn anew: [bootstraps, count]."""
    return torch.randint(count, (NUM_BOOTSTRAPS, count), generator=generator)


def resampled_means(values: Tensor, generator: torch.Generator) -> Tensor:
    """The means [bootstraps, ...] of contexts that are drawn anew from values [contexts, ...]."""
    return values[resampled_places(values.shape[0], generator)].mean(1)


def interval(values: Tensor, generator: torch.Generator) -> tuple[float, float, float]:
    """Mean and the bounds of its 95 % interval, by bootstrap over values [n]."""
    means = resampled_means(values, generator)
    return float(values.mean()), float(means.quantile(0.025)), float(means.quantile(0.975))


def summarise(cells: dict[str, Cell]) -> list[dict[str, Any]]:
    """A row a cell, with the difference to adaptive trees of the same budget and temperature at the same contexts."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for key, cell in cells.items():
        temperature, size, name = key.split("|")
        tokens = torch.tensor(cell.tokens, dtype=torch.float64)
        mean, low, high = interval(tokens, generator)
        row = {
            "temperature": float(temperature),
            "size": int(size),
            "policy": name,
            "contexts": len(cell.tokens),
            "tokens_per_pass": mean,
            "interval": [low, high],
            "nodes": statistics.mean(cell.nodes),
        }
        reference = cells.get(f"{temperature}|{size}|{REFERENCE}")
        if reference is not None and reference is not cell:
            behind = torch.tensor(reference.tokens, dtype=torch.float64) - tokens
            row["behind"], *row["behind_interval"] = interval(behind, generator)
        rows.append(row)
    return sorted(rows, key=lambda row: (row["temperature"], row["size"], row["policy"] != REFERENCE))


def print_table(rows: list[dict[str, Any]]) -> None:
    """Tokens per pass and how far behind adaptive trees they are; * marks what the interval does not tell apart."""
    heading = f"{'T':>4}{'size':>5} {'policy':18}{'tok/pass':>9}{'95 %':>14}"
    print(f"{heading}  {'adaptive less it':>16}{'95 %':>15}{'nodes':>8}")
    for row in rows:
        low, high = row["interval"]
        behind = " " * 32
        if "behind" in row:
            least, most = row["behind_interval"]
            tie = "*" if least <= 0 <= most else " "
            behind = f"{row['behind']:>+16.3f}{tie}{least:>+7.2f} to {most:<+.2f}".ljust(32)
        print(f"{row['temperature']:>4g}{row['size']:>5} {row['policy']:18}{row['tokens_per_pass']:>9.2f}"
              f"{low:>7.2f}-{high:<6.2f}  {behind}{row['nodes']:>7.0f}")  # fmt: skip


def draw_figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per pass against budget, a panel a temperature, of the policies that people choose from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = sorted({row["temperature"] for row in rows})
    figure, panels = pyplot.subplots(
        1, len(temperatures), figsize=(4.2 * len(temperatures), 4.2), squeeze=False, sharey=True
    )
    names = [name for name in IN_FIGURE if any(row["policy"] == name for row in rows)]
    colours = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        for index, name in enumerate(names):
            line = [row for row in rows if row["policy"] == name and row["temperature"] == temperature]
            sizes, means = [row["size"] for row in line], [row["tokens_per_pass"] for row in line]
            width = 2.4 if name == REFERENCE else 1.4
            panel.plot(sizes, means, marker="osD^vx"[index], markersize=4, linewidth=width, color=colours[index],
                       label=name, zorder=3 if name == REFERENCE else 2)  # fmt: skip
        panel.set(xscale="log", xlabel="nodes", title=f"temperature {temperature:g}")
        panel.set_xticks(sorted({row["size"] for row in rows}), labels=sorted({row["size"] for row in rows}))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens per pass")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_context_options(parser)
    parser.add_argument("--noises", type=int, default=4, help="of a context, for coupled children")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 768])
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--draft-temps", type=float, nargs="+", help="each policy with each [its own]")
    parser.add_argument("--only", nargs="+", help="policies whose name contains one of these")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        parts = pool.starmap(run_part, [(part, arguments) for part in range(arguments.processes)])
    found: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for part in parts:
        for key, cell in part.items():
            found[key] += zip(cell.contexts, cell.tokens, cell.nodes, strict=True)
    cells = {key: Cell(*map(list, zip(*sorted(entries), strict=True))) for key, entries in found.items()}  # type: ignore[arg-type]
    rows = summarise(cells)
    print_table(rows)
    if arguments.figure:
        draw_figure(rows, arguments.figure)
    print(json.dumps({"rows": rows, "seed": arguments.seed}))


if __name__ == "__main__":
    main()
