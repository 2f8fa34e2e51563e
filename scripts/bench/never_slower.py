"""The default against the better of plain decoding and looked up text, cell by cell: it should never be slower.

    python -m scripts.bench.never_slower                                     the built-in pair, in memory
    python -m scripts.make.inflate large --params 300M
    python -m scripts.bench.never_slower -m large -md edgespec/demo/draft --situations memory cold link

A cell is a situation, a number of texts under way together, and their length; each turn has other texts of sixteen, so
that a cell of one text does not hang on one text's luck. Three engines decode the same prompts with the model's own
sampling: by default, without a draft and trees (`-md none --policy none`), and without a draft
(`-md none`). In a turn each begins with the tuners of a fresh process, and their steps alternate: other programs slow
all alike. A rate is the tokens after the prompts over the seconds that they took; the draft's reading of the prompts
counts. "of best" is the median of the turns' ratios of the default to the better one of the other two, with quartiles.

Situations: memory (all layers resident), cold (no layer is ever found in the page cache), link (each layer takes its
bytes' time at `--link-gib-per-s`). A cell ends early, after two turns at the least, where it has taken `--cell-s`. It
has more turns than `--turns` where these took less than `--least-s`: a turn of a few steps is noise. All of it is
done with engines that are opened anew, `--openings` times, each time another one first: where weights come to lie makes
one of two equal engines slower, and the first by 2 to 3 %. With `--again` plain decoding is in each turn twice; the
ratio of the two, "again", is noise. The last line is JSON.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import offload.loaders
from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.find import find_pair
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from edgespec.text.handle import TextHandle
from edgespec.tuning.costs import StepCosts
from profiles.measure import machine_facts
from scripts.situations import GIB, SEED, cut_texts, drop_behind_reader, held_out_halves, throttle_edgespec

DEFAULT, PLAIN, LOOKUP = "default", "plain", "lookup"
AGAIN = "again"  # plain decoding a second time
PROMPT_TOKENS = 64
PASSAGES = 16
CONTEXT_TOKENS = 1024
LEAST_TURNS = 2


@contextmanager
def situated(situation: str, pair: ModelPair, bytes_per_s: float) -> Iterator[None]:
    """Within this block layers that stream take the situation's time."""
    load = offload.loaders.CpuLoader.load
    if situation == "cold":
        drop_behind_reader(pair)
    elif situation == "link":
        throttle_edgespec(bytes_per_s)
    yield
    offload.loaders.CpuLoader.load = load  # type: ignore[method-assign]


def open_engines(
    stack: ExitStack,
    pair: ModelPair,
    alone: Callable[[], ModelPair],
    situation: str,
    arguments: argparse.Namespace,
    *,
    first: int = 0,
) -> dict[str, Engine]:
    """Open the engines by mode, each with weights of its own: shared ones would be found in the processor's caches.

    The one with the number `first` is opened first.
    """
    limits = None if situation == "memory" else MemoryLimits(max_resident_layers=0)
    options = {
        "limits": limits, "context_tokens": CONTEXT_TOKENS, "threads": arguments.threads,
        "parallel": max(arguments.texts), "self_check": False, "draft_check": False,
    }  # fmt: skip
    plain = TreeSettings(policy="none")
    trees = {DEFAULT: None, PLAIN: plain, LOOKUP: None} | ({AGAIN: plain} if arguments.again else {})
    engines = {
        mode: stack.enter_context(Engine.from_pair(pair if mode == DEFAULT else alone(), tree=trees[mode], **options))
        for mode in rotated(list(trees), first)
    }
    return {mode: engines[mode] for mode in trees}


def rotated(names: Sequence[str], first: int) -> list[str]:
    """Return the names in their order, beginning with that of this number, modulo their number."""
    start = first % len(names)
    return [*names[start:], *names[:start]]


def start_anew(engine: Engine) -> None:
    """Let nothing be left of what the engine's tuners have learned."""
    engine.forget()
    engine.trees.forget_costs()
    engine.trees._costs = StepCosts()
    if engine._texts._threads is not None:
        engine._texts._threads.forget()


def race(engines: dict[str, Engine], prompts: Sequence[str], num_tokens: int, *, turn: int = 0) -> dict[str, float]:
    """Return the tokens a second of these texts together, by mode: the one that is furthest behind takes a step.

    So whatever else the machine does slows all alike. Among equals the first changes with the turn: it finds the caches
    of the processor full of other engines' weights. Raises SystemExit where a text is another.
    """
    order = rotated(list(engines), turn)
    handles: dict[str, list[TextHandle]] = {}
    for mode, engine in engines.items():
        start_anew(engine)
        requests = [engine.request(prompt, max_new_tokens=num_tokens, seed=SEED) for prompt in prompts]
        handles[mode] = [engine.submit(request, keeps=False) for request in requests]
        while not all(handle.added or handle.is_done for handle in handles[mode]):
            engine.advance()
    before = {mode: num_added(own) for mode, own in handles.items()}
    seconds = dict.fromkeys(engines, 0.0)
    while running := [mode for mode in order if not all(handle.is_done for handle in handles[mode])]:
        mode = min(running, key=lambda mode: num_added(handles[mode]))
        started = time.perf_counter()
        engines[mode].advance()
        seconds[mode] += time.perf_counter() - started
    texts = {mode: [handle.result().token_ids for handle in own] for mode, own in handles.items()}
    if len({tuple(map(tuple, own)) for own in texts.values()}) > 1:
        raise SystemExit(f"another text than by {order[0]}")
    return {mode: (sum(map(len, own)) - before[mode]) / seconds[mode] for mode, own in texts.items()}


def num_added(handles: Sequence[TextHandle]) -> int:
    """Return the tokens after the prompts so far."""
    return sum(len(handle.added) for handle in handles)


def measure(
    engines: dict[str, Engine],
    passages: Sequence[str],
    num_texts: int,
    num_tokens: int,
    arguments: argparse.Namespace,
    *,
    first_turn: int = 0,
) -> dict[str, list[float]]:
    """Return the rates of all modes, turn by turn; each turn goes on in the passages where the one before ended."""
    rates: dict[str, list[float]] = {mode: [] for mode in engines}
    started = time.perf_counter()
    for turn in itertools.count():
        prompts = rotated(passages, (first_turn + turn) * num_texts)[:num_texts]
        passed_s = time.perf_counter() - started
        if turn >= arguments.turns and passed_s >= arguments.least_s:
            break
        if turn >= LEAST_TURNS and passed_s * (turn + 1) / turn > arguments.cell_s:
            break
        for mode, found in race(engines, prompts, num_tokens, turn=first_turn + turn).items():
            rates[mode].append(found)
    return rates


def row_of(situation: str, num_texts: int, num_tokens: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return a cell's numbers."""
    medians = {mode: statistics.median(own) for mode, own in rates.items()}
    best = max((PLAIN, LOOKUP), key=medians.__getitem__)
    ratios = [own / other for own, other in zip(rates[DEFAULT], rates[best], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "situation": situation, "texts": num_texts, "tokens": num_tokens, "turns": len(ratios),
        **{mode: round(median, 2) for mode, median in medians.items()},
        "of_best": round(statistics.median(ratios), 3),
        "quartiles": [round(found, 3) for found in quartiles],
    }  # fmt: skip


def in_words(row: dict[str, Any]) -> str:
    """Return a cell's numbers as a line."""
    low, _, high = row["quartiles"]
    again = f"  again {row[AGAIN] / row[PLAIN]:.3f}" if AGAIN in row else ""
    return (
        f"{row['situation']:<10}{row['texts']:>6}{row['tokens']:>7}{row['turns']:>6}{row[DEFAULT]:>9}"
        f"{row[PLAIN]:>8}{row[LOOKUP]:>8}  {row['of_best']:.3f} ({low:.2f} to {high:.2f}){again}"
    )


def main() -> None:
    """Measure cell by cell, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="a folder or a GGUF file; the built-in pair by default")
    parser.add_argument("-md", "--draft", help="by default the target's own, if it has one")
    parser.add_argument("--situations", nargs="+", choices=["memory", "cold", "link"], default=["memory"])
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 5, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 120, 600])
    parser.add_argument("--openings", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cell-s", type=float, default=15.0, help="seconds that a cell may take each time")
    parser.add_argument("--least-s", type=float, default=4.0, help="seconds that a cell takes at the least")
    parser.add_argument("--again", action="store_true", help="measure plain decoding twice, to see what is noise")
    parser.add_argument("--link-gib-per-s", type=float, default=0.5)
    parser.add_argument("--threads", type=int, help="by default as many as pay, step by step")
    arguments = parser.parse_args()
    passages = cut_texts(held_out_halves()[1], count=max(PASSAGES, *arguments.texts), tokens=PROMPT_TOKENS, seed=SEED)
    report = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGESPEC_HOME"] = home
        target, draft, *_ = find_pair(arguments.model, arguments.draft)
        pair = open_pair(target, draft)

        def alone() -> ModelPair:
            return open_pair(target or DEMO_FOLDER / "target", None)

        found: dict[tuple[str, int, int], dict[str, list[float]]] = {}
        cells = list(itertools.product(arguments.situations, arguments.texts, arguments.tokens))
        print(f"{'situation':<10}{'texts':>6}{'tokens':>7}{'turns':>6}{'default':>9}{'plain':>8}{'lookup':>8}  of best")
        for situation, opening in itertools.product(arguments.situations, range(arguments.openings)):
            with situated(situation, pair, arguments.link_gib_per_s * GIB), ExitStack() as stack:
                engines = open_engines(stack, pair, alone, situation, arguments, first=opening)
                race(engines, passages[:2], 8)  # kernels are loaded, and files are open
                gc.collect()
                gc.freeze()  # else one engine's turn is made longer by a look through the objects of all
                for cell in (one for one in cells if one[0] == situation):
                    known = found.setdefault(cell, {mode: [] for mode in engines})
                    rates = measure(engines, passages, *cell[1:], arguments, first_turn=len(known[DEFAULT]))
                    for mode, own in rates.items():
                        known[mode] += own
                    if opening == arguments.openings - 1:
                        report.append(row := row_of(*cell, known))
                        print(in_words(row), flush=True)
            gc.unfreeze()
    machine = dataclasses.asdict(machine_facts(torch.device("cpu")))
    print(json.dumps({"machine": machine, "arguments": vars(arguments), "rows": report}))


if __name__ == "__main__":
    main()
