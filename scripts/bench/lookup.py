"""Looked up text alone, the draft alone, and both: tokens a pass and tokens a second by kind of text.

    python -m scripts.bench.lookup                          the built-in pair, resident and over a simulated link
    python -m scripts.bench.lookup --situations resident --sizes 64 --kinds code copy

Kinds: code continues held-out library code; copy writes a class a third time under another name; rows are prompts that
resemble each other, with `use_corpus(own_texts=True)`; chat quotes itself over three turns. Trees are held to 8 and 64
nodes, then they tune themselves ("tuned"), with a draft and for a target alone. Over the link no layer is resident, and
each takes its bytes' time at the link's speed, on the reader's thread: a pass waits as for a target that does not fit.

"both" leaves the draft out of steps in which it does not pay by the clock, so that its tokens a pass vary; "always"
lets it grow in every step in which its nodes may be among the best: its tokens a pass are the same in every run.

Every repeat goes through all modes, each time from the next one on, and all texts of a kind must be those of plain
decoding. `--threads` holds the number of threads, which is tuned otherwise. "x best" is "both" against the faster of
its two sources at that size, repeat by repeat. The last line is JSON: medians, and the quartiles of "x best".
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.text.results import GenerationResult
from edgespec.tuning.draft_worth import DraftWorth
from profiles.measure import machine_facts
from scripts.situations import SEED, cut_texts, held_out_halves, throttle_edgespec

GIB = 1 << 30
PLAIN, BOTH = "plain", "both"
ALWAYS = "always"  # begins a mode's name
COPIED = '''class {name}:
    """A table of entries by their names."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding
        self.entries = {{}}
        self.is_open = False

    def read(self):
        with open(self.path, encoding=self.encoding) as file:
            for line in file:
                name, value = line.strip().split("=", 1)
                self.entries[name] = value
        self.is_open = True

    def get(self, name, default=None):
        if not self.is_open:
            self.read()
        return self.entries.get(name, default)

    def close(self):
        self.entries.clear()
        self.is_open = False
'''
ROW = """def test_{name}_of_an_empty_{kind}():
    {kind} = make_{kind}()
    with self.assertRaises(ValueError):
        {kind}.{name}()
    self.assertEqual(len({kind}), 0)


def test_{name}_of_a_full_{kind}():
"""
QUESTION = "def {name}(path):\n    with open(path, encoding='utf-8') as file:\n"


@dataclass(frozen=True, slots=True)
class Found:
    """What some texts came to."""

    tokens: int
    passes: int
    decode_s: float
    grow_s: float
    looked_up: int
    texts: tuple[tuple[int, ...], ...]

    @property
    def per_pass(self) -> float:
        """Tokens a pass."""
        return self.tokens / max(1, self.passes)

    @property
    def per_s(self) -> float:
        """Tokens a second, without prompts."""
        return self.tokens / self.decode_s


class Unjudged(DraftWorth):
    """Trees of a draft's that grow whether they pay or not."""

    is_known = False


@contextmanager
def drafts_always(engine: Engine, tree: TreeSettings) -> Iterator[None]:
    """Within this block the draft grows such trees whether they pay or not."""
    worths = engine.trees.worths
    known = worths.pop(tree, None)
    worths[tree] = Unjudged()
    yield
    del worths[tree]
    if known is not None:
        worths[tree] = known


@functools.cache
def prompts_of(kind: str) -> list[str]:
    """The prompts of a kind."""
    if kind == "code":
        return cut_texts(held_out_halves()[1], count=2, tokens=160, seed=SEED)
    if kind == "copy":
        first, second, third = (COPIED.format(name=f"{name}Table") for name in ("Entry", "Setting", "Name"))
        return ["\n\n".join([first, second, *third.split("\n")[:1]]) + "\n"]
    return [ROW.format(name=name, kind=kind) for name, kind in (("pop", "stack"), ("get", "queue"), ("top", "heap"))]


def results_of(engine: Engine, kind: str, *, new_tokens: int, temperature: float) -> Iterator[GenerationResult]:
    """Yield the texts of a kind."""
    engine.trees.use_corpus(own_texts=kind == "rows")
    num_texts = 3 if kind == "chat" else len(prompts_of(kind))
    options = {"temperature": temperature, "seed": SEED, "max_new_tokens": new_tokens // num_texts}
    if kind == "chat":
        chat = engine.chat(raw=True, **options)
        for name in ("read_lines", "read_words", "read_lines"):
            yield chat.send(QUESTION.format(name=name))
        return
    for prompt in prompts_of(kind):
        yield engine.generate(prompt, **options)


def measure(engine: Engine, kind: str, tree: TreeSettings | None, *, new_tokens: int, temperature: float) -> Found:
    """Decode the texts of a kind with these trees, or with those that tune themselves."""
    engine.use_tree(tree)
    engine.forget()
    return found_of(list(results_of(engine, kind, new_tokens=new_tokens, temperature=temperature)))


def found_of(results: Sequence[GenerationResult]) -> Found:
    """What these texts came to."""
    passes = [step for result in results for step in result.passes]
    return Found(
        tokens=sum(len(step.tokens) for step in passes),
        passes=len(passes),
        decode_s=sum(result.total_s - result.time_to_first_token_s for result in results),
        grow_s=sum(step.grow_s for step in passes),
        looked_up=sum(step.num_looked_up for step in passes),
        texts=tuple(result.token_ids for result in results),
    )


def tune_from(engine: Engine, tree: TreeSettings) -> Engine:
    """Let an engine's trees tune themselves from these."""
    engine.trees.own = tree
    engine.trees.policy = engine.trees._open()
    return engine


def held_to(sizes: Sequence[int]) -> dict[str, TreeSettings]:
    """Trees of fixed sizes, by mode."""
    found = {}
    for size in sizes:
        found[f"lookup {size}"] = TreeSettings(policy="lookup", size=size)
        found[f"draft {size}"] = TreeSettings(size=size, lookup=False)
        found[f"{BOTH} {size}"] = found[f"{ALWAYS} {size}"] = TreeSettings(size=size)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["code", "copy", "rows", "chat"])
    parser.add_argument("--situations", nargs="+", default=["resident", "link"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-n", "--new-tokens", type=int, default=192, help="of the texts of a kind together")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--link-gib-per-s", type=float, default=0.25)
    parser.add_argument("--no-tuned", action="store_true", help="leave trees that tune themselves out")
    parser.add_argument("--no-warm-up", action="store_true")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    throttle_edgespec(arguments.link_gib_per_s * GIB)  # only layers that stream are loaded so
    report = []
    for situation in arguments.situations:
        limits = None if situation == "resident" else MemoryLimits(max_resident_layers=0)
        with ExitStack() as stack:
            shared = {"limits": limits, "context_tokens": 1024, "threads": arguments.threads}
            engine = stack.enter_context(Engine.from_pair(open_pair(None, None), tree=TreeSettings(size=64), **shared))
            modes: dict[str, tuple[Engine, TreeSettings | None]] = {PLAIN: (engine, TreeSettings(policy="none"))}
            modes |= {name: (engine, tree) for name, tree in held_to(arguments.sizes).items()}
            if not arguments.no_tuned:
                target = DEMO_FOLDER / "target"
                alone = stack.enter_context(Engine.from_pair(open_pair(target, None), **shared))
                modes["lookup tuned"] = (alone, None)
                pair = open_pair(None, None)
                for name in ("draft", BOTH):
                    tuned = stack.enter_context(Engine.from_pair(pair, **shared))
                    modes[f"{name} tuned"] = (tune_from(tuned, TreeSettings(lookup=name == BOTH)), None)
            for kind in arguments.kinds:
                report += table(situation, kind, modes, arguments)
    print(
        json.dumps(
            {
                "machine": dataclasses.asdict(machine_facts(torch.device("cpu"))),
                "arguments": vars(arguments),
                "rows": report,
            }
        )
    )


def table(
    situation: str, kind: str, modes: dict[str, tuple[Engine, TreeSettings | None]], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Measure all modes on a kind of text, print them, and return them."""
    found: dict[str, list[Found]] = {name: [] for name in modes}
    plain_mode, *others = modes.items()
    for repeat in range(0 if arguments.no_warm_up else -1, arguments.repeats):
        others = others[1:] + others[:1]
        for name, (engine, tree) in (plain_mode, *others):
            with drafts_always(engine, tree) if tree and name.startswith(ALWAYS) else nullcontext():
                one = measure(engine, kind, tree, new_tokens=arguments.new_tokens, temperature=arguments.temp)
            plain = found[PLAIN][0] if found[PLAIN] else None
            if plain is not None and one.texts != plain.texts:
                raise SystemExit(f"{situation}, {kind}, {name}: another text than plain decoding's")
            if repeat >= 0:
                found[name].append(one)
    print(f"\n{situation}, {kind}: {'mode':<14}{'tok/pass':>9}{'tok/s':>8}{'x plain':>9}{'looked up':>10}  x best")
    rows = []
    for name, own in found.items():
        ratios = [one.per_s / base.per_s for one, base in zip(own, found[PLAIN], strict=True)]
        row = {
            "situation": situation, "kind": kind, "mode": name,
            "tokens_per_pass": round(statistics.median(one.per_pass for one in own), 3),
            "tokens_per_s": round(statistics.median(one.per_s for one in own), 2),
            "times_plain": round(statistics.median(ratios), 3),
            "looked_up_share": round(own[-1].looked_up / max(1, own[-1].tokens), 3),
            "times_best_quartiles": times_best(name, found),
        }  # fmt: skip
        rows.append(row)
        numbers = f"{row['tokens_per_pass']:>9.2f}{row['tokens_per_s']:>8.1f}{row['times_plain']:>9.2f}"
        best = "" if (of := row["times_best_quartiles"]) is None else "  {1:.2f} ({0:.2f} to {2:.2f})".format(*of)
        print(f"{'':<{len(situation) + len(kind) + 4}}{name:<14}{numbers}{row['looked_up_share']:>10.0%}{best}")
    return rows


def times_best(name: str, found: Mapping[str, Sequence[Found]]) -> list[float] | None:
    """Quartiles of tokens a second of "both" against the faster of its two sources, of the same repeats."""
    kind, _, size = name.partition(" ")
    if kind != BOTH or len(found[name]) < 2:
        return None
    sources = [found[f"lookup {size}"], found[f"draft {size}"]]
    best = max(sources, key=lambda source: statistics.median(one.per_s for one in source))
    ratios = [one.per_s / base.per_s for one, base in zip(found[name], best, strict=True)]
    return [round(quartile, 3) for quartile in statistics.quantiles(ratios, n=4, method="inclusive")]


if __name__ == "__main__":
    main()
