"""Many prompts: edgespec with texts under way together, against transformers with accelerate and its batches.

    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.batch large                                  warm and cold, bf16
    python -m scripts.bench.batch large --modes cold --max-cpu-mem 478MiB
    python -m scripts.bench.batch large --modes cold --link-gib-per-s 0.5

Every system decodes the same prompts greedily, of unequal lengths, from the first prompt to the last token. accelerate
maps the layers from the disk and takes left-padded batches. Cold: nothing that was read for one pass serves the
next, as in bench.offload. Systems have a fresh process each and take turns; medians of --repeats are quoted. A pass
is a forward of the target, its rows those of all texts, prompts included; a step's are those of trees and roots.
Dropping the cache is not counted. Prints a table, ratios and one JSON line.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import edgespec.decode.batch as batch_module
import edgespec.decode.clock as clock_module
from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli.generate.records import peak_resident_bytes
from edgespec.config import parse_size
from edgespec.model.causal_model import CausalModel
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from edgespec.tuning.step import PassCost
from profiles.measure import drop_page_cache
from scripts.bench.offload import open_transformers, slow_down
from scripts.situations import MIB, cut_texts, held_out_halves, start_child

SEED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to decode all prompts."""

    kind: str  # edgespec | accelerate
    texts: int
    trees: str = "none"  # none | tuned
    mode: str = "warm"

    @property
    def name(self) -> str:
        """As in the table."""
        trees = f" {self.trees}" if self.kind == "edgespec" else ""
        return f"{self.kind}{trees} {self.texts}"


@dataclass(slots=True)
class Log:
    """What the passes of a run took."""

    rows: list[int] = field(default_factory=list)  # of the target, a pass
    draft_calls: int = 0
    costs: list[PassCost] = field(default_factory=list)  # of the steps
    dropped_s: float = 0.0


@contextmanager
def logged(engine: Engine, log: Log) -> Iterator[None]:
    """Within this block, passes, draft calls and steps are noted."""
    run, expand, make = CausalModel._run, batch_module.expand_batched, clock_module.PassCost

    def counted_run(self: CausalModel, parts: Any, chunks: Any) -> Any:
        if self is engine.target_model:
            log.rows.append(sum(part.count for part in parts))
        return run(self, parts, chunks)

    def counted_expand(expansions: Any) -> Any:
        log.draft_calls += 1
        return expand(expansions)

    def noted(**values: Any) -> PassCost:
        log.costs.append(make(**values))
        return log.costs[-1]

    CausalModel._run = counted_run  # type: ignore[method-assign]
    batch_module.expand_batched = counted_expand
    clock_module.PassCost = noted  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        CausalModel._run = run  # type: ignore[method-assign]
        batch_module.expand_batched, clock_module.PassCost = expand, make  # type: ignore[misc]


def run_edgespec(system: System, pair: ModelPair, prompts: list[list[int]], arguments: argparse.Namespace) -> Any:
    """Decode all prompts; returns the tokens, the seconds and what passes took."""
    longest, log = max(map(len, prompts)), Log()
    with Engine.from_pair(
        pair,
        tree=TreeSettings(policy="none") if system.trees == "none" else None,
        limits=MemoryLimits(
            max_cpu_bytes=arguments.max_cpu_mem, max_resident_layers=0 if system.mode == "cold" else None
        ),
        device="cpu",
        dtype=arguments.dtype,
        context_tokens=longest + arguments.new_tokens,
        prompt_tokens=longest,
        parallel=system.texts,
    ) as engine:
        requests = [
            engine.request(
                ids, max_new_tokens=arguments.new_tokens, sampling=SamplingSettings(), seed=SEED, name=str(n)
            )
            for n, ids in enumerate(prompts)
        ]
        with logged(engine, log):
            started = time.perf_counter()
            found = {number: text for number, text in engine.generate_many(requests) if not isinstance(text, Exception)}
            seconds = time.perf_counter() - started
    return [list(found[number].token_ids) for number in range(len(prompts))], seconds, log


def run_accelerate(system: System, pair: ModelPair, prompts: list[list[int]], arguments: argparse.Namespace) -> Any:
    """Decode all prompts in batches; returns the tokens, the seconds and what passes took."""
    arguments.max_new_tokens, arguments.temp = arguments.new_tokens, 0.0
    stop = sorted(pair.stop_tokens)
    model = open_transformers(pair.target.folder, arguments, stop=stop, on_disk=True)
    log = Log()

    def before(_module: Any, _arguments: Any, named: dict[str, Any]) -> None:
        log.rows.append(int(named["input_ids"].numel()))
        if system.mode == "cold":
            now = time.perf_counter()
            drop_page_cache(arguments.files)
            log.dropped_s += time.perf_counter() - now

    model.register_forward_pre_hook(before, with_kwargs=True)
    tokens = []
    started = time.perf_counter()
    for start in range(0, len(prompts), system.texts):
        tokens += generate_batch(model, prompts[start : start + system.texts], stop)
    return tokens, time.perf_counter() - started - log.dropped_s, log


def generate_batch(model: Any, prompts: list[list[int]], stop: list[int]) -> list[list[int]]:
    """What transformers makes of a batch, padded on the left: each text's tokens up to its end."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[stop[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    new = model.generate(ids, attention_mask=mask)[:, longest:].tolist()
    return [row[: next((n + 1 for n, token in enumerate(row) if token in stop), len(row))] for row in new]


def run_child(system: System, arguments: argparse.Namespace) -> None:
    """In a fresh process: decode, and print what was measured as JSON."""
    torch.set_num_threads(arguments.threads)
    pair = open_pair(arguments.model, DEMO_FOLDER / "draft")
    arguments.files = pair.target.checkpoint.files
    slow_down(pair, system.mode, arguments.link_gib_per_s)
    texts = cut_texts(held_out_halves()[1], count=arguments.prompts, tokens=arguments.prompt_tokens, seed=SEED)
    prompts = [pair.tokenizer.encode(text) for text in texts]
    prompts = [ids[: max(4, len(ids) * (1 + number % 4) // 4)] for number, ids in enumerate(prompts)]  # of all lengths
    run: Callable[..., Any] = run_edgespec if system.kind == "edgespec" else run_accelerate
    tokens, seconds, log = run(system, pair, prompts, arguments)
    steps = [cost for cost in log.costs if cost.num_texts]
    print(
        json.dumps({
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": sum(map(len, tokens)) / seconds,
            "passes": len(log.rows),
            "pass_s": seconds / len(log.rows),
            "rows_per_pass": statistics.mean(log.rows),
            "rows_per_step": statistics.mean(cost.num_rows for cost in steps) if steps else 0.0,
            "draft_calls_per_step": log.draft_calls / max(1, len(steps)),
            "growth_s_per_step": statistics.median(cost.grow_s for cost in steps) if steps else 0.0,
            "peak_bytes": peak_resident_bytes(),
        })
    )  # fmt: skip


def main() -> None:
    """All systems in turn, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an inflated checkpoint of the built-in target")
    parser.add_argument("--modes", nargs="+", default=["warm", "cold"], choices=["warm", "cold"])
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8, 16], help="of accelerate")
    parser.add_argument("--trees", nargs="+", default=["none", "tuned"], choices=["none", "tuned"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the longest")
    parser.add_argument("--new-tokens", "-n", type=int, default=48)
    parser.add_argument("--max-cpu-mem", type=parse_size)
    parser.add_argument("--link-gib-per-s", type=float)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(System(**json.loads(arguments.child)), arguments)
        return
    systems = [System(kind="edgespec", texts=texts, trees=trees, mode=mode)
               for mode in arguments.modes for trees in arguments.trees for texts in arguments.texts]  # fmt: skip
    systems += [
        System(kind="accelerate", texts=texts, mode=mode) for mode in arguments.modes for texts in arguments.batches
    ]
    reports: dict[System, list[dict[str, Any]]] = {system: [] for system in systems}
    for _ in range(arguments.repeats):
        for system in systems:
            reports[system].append(start_child("scripts.bench.batch", system))
            print(f"{system.mode} {system.name}: {reports[system][-1]['tokens_per_s']:.2f} tokens/s", file=sys.stderr)
    rows = []
    print(f"{'mode':6} {'system':20} {'tok/s':>8} {'seconds':>8} {'passes':>7} {'s/pass':>7} {'rows/pass':>9} "
          f"{'rows/step':>9} {'calls/step':>10} {'grow ms':>8} {'peak MiB':>9}")  # fmt: skip
    for system in systems:
        found = {
            name: statistics.median(report[name] for report in reports[system])
            for name in reports[system][0]
            if name != "tokens"
        }
        rows.append({**dataclasses.asdict(system), **found})
        print(f"{system.mode:6} {system.name:20} {found['tokens_per_s']:8.2f} {found['seconds']:8.1f} "
              f"{found['passes']:7.0f} {found['pass_s']:7.3f} {found['rows_per_pass']:9.1f} "
              f"{found['rows_per_step']:9.1f} {found['draft_calls_per_step']:10.1f} "
              f"{1e3 * found['growth_s_per_step']:8.1f} "
              f"{found['peak_bytes'] / MIB:9.0f}")  # fmt: skip
    for mode in arguments.modes:
        of_mode = [row for row in rows if row["mode"] == mode]
        best = max(of_mode, key=lambda row: row["tokens_per_s"] if row["kind"] == "edgespec" else 0.0)
        print(f"{mode}: best is {best['trees']} trees, {best['texts']} texts")
        for name, others in {
            "edgespec's best with one text": [r for r in of_mode if r["kind"] == "edgespec" and r["texts"] == 1],
            "accelerate's best batch": [r for r in of_mode if r["kind"] == "accelerate"],
        }.items():
            if others:
                ratio = best["tokens_per_s"] / max(row["tokens_per_s"] for row in others)
                print(f"  over {name}: {ratio:.2f}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
