"""Do trees that tune themselves come near the best fixed ones, and never fall behind plain decoding?

    python -m scripts.make.inflate /tmp/1b --params 1B
    python -m scripts.check.tuned /tmp/1b --only warm
    python -m scripts.make.inflate_experts /tmp/moe
    python -m scripts.check.tuned /tmp/moe --only warm cold limit "limit 0.5 GiB/s" --limit 690MiB --no-profile

The situations are those of `scripts.situations`, each in a process of its own, and a limit of memory before a slow
disk, which a mixture's experts come from. All ways of decoding take every prompt in turn, in one process: plainly;
tuned from nothing; tuned from a profile, which is measured first; and adaptive trees of fixed sizes, of which the best
two are kept after the first prompts. Prints a line a way: tokens/s of all prompts, of those from the second on, and
both over plain decoding and over the best fixed size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.config import parse_size
from edgespec.doctor.benchmark import Text, continue_one
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.placement.pair_setup import set_up_by_profile
from edgespec.placement.run_config import resolve_run_config
from edgespec.text.request import TextOptions
from edgespec.tree.settings import TreeOptions
from scripts.bench.expert_passes import slow_reads
from scripts.bench.offload import drop_behind_reader, throttle_edgespec
from scripts.situations import GIB, SAMPLING, SEED, SITUATIONS, captured, read_texts, write_prompts

SLOW_LIMIT = "limit 0.5 GiB/s"  # of memory, before a disk of that rate
OPTIONS = {**SITUATIONS, SLOW_LIMIT: SITUATIONS["limit"]}
FIXED = (2, 4, 8, 16, 32, 64, 256)
ALL_FIXED_PROMPTS = 3  # after which the two best are kept
KEPT = 2


def run_child(name: str, arguments: argparse.Namespace) -> None:
    """One situation; the last line on stdout is what was found."""
    torch.set_num_threads(arguments.threads)
    is_built_in = name == "built-in"
    pair = open_pair(None if is_built_in else arguments.model, DEMO_FOLDER / "draft")
    if name == "cold":
        drop_behind_reader(pair)
    if name.startswith("link"):
        throttle_edgespec(float(name.split()[1]) * GIB)
    if name == SLOW_LIMIT:
        slow_reads(float(name.split()[1]) * GIB)
    options = [arguments.limit if part == "LIMIT" else part for part in OPTIONS[name]]
    if not is_built_in:
        options = ["-m", str(arguments.model), "-md", str(DEMO_FOLDER / "draft"), *options]
    sampling = replace(SAMPLING, temperature=arguments.temperature)
    texts = [pair.tokenizer.encode(text) for text in read_texts(arguments.prompts)]
    run_config = resolve_run_config(
        pair.target,
        pair.max_context,
        draft=pair.draft,
        limits=MemoryLimits(
            max_resident_layers=0 if "-ngl" in options else None,
            max_cpu_bytes=parse_size(arguments.limit) if "--max-cpu-mem" in options else None,
        ),
        dtype="bfloat16" if "bfloat16" in options else "auto",
        context_tokens=max(map(len, texts)) + arguments.new_tokens,
        prompt_tokens=max(map(len, texts)),
    )
    if arguments.profile:
        started = perf_counter()
        sys.stderr.write(captured(["profile", *options, "--prompts", str(arguments.prompts),
                                   "--temps", str(arguments.temperature)]))  # fmt: skip
        print(f"{name}: the profile took {perf_counter() - started:.0f} s", file=sys.stderr)

    def loaded(source: str) -> Engine:
        return stack.enter_context(
            Engine(set_up_by_profile(pair, run_config, TreeOptions(profile=source), temperature=arguments.temperature))
        )

    with ExitStack() as stack:
        engine = loaded("none")
        ways: dict[str, tuple[Engine, TreeSettings | None]] = {
            "plain": (engine, TreeSettings(policy="none")),
            "tuned": (engine, None),
        }
        if arguments.profile:
            ways["profile"] = (loaded("auto"), None)
        ways |= {f"fixed {size}": (engine, TreeSettings(size=size, lookup=False)) for size in arguments.sizes
                 if size <= engine.largest_tree.num_nodes}  # fmt: skip
        done: dict[str, list[Text]] = {way: [] for way in ways}
        for number, ids in enumerate(texts):
            if number == ALL_FIXED_PROMPTS:
                fixed = sorted((way for way in ways if way.startswith("fixed")), key=lambda way: per_s(done[way]))
                for way in fixed[:-KEPT]:
                    del ways[way]
            order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for way in order:
                if way == "plain" and number % arguments.plain_every:
                    continue
                own, tree = ways[way]
                options: TextOptions = {
                    "sampling": sampling, "max_new_tokens": arguments.new_tokens, "seed": SEED + number
                }  # fmt: skip
                done[way].append(continue_one(own, ids, tree, options=options))
            engine.use_tree(None)
            print(f"{name}: {number + 1} of {len(texts)}, {engine.trees_in_use(sampling)}", file=sys.stderr)
        best = max((way for way in ways if way.startswith("fixed")), key=lambda way: per_s(done[way][1:]))
        counts = engine.expert_counts
        print(json.dumps({
            "situation": name,
            "best": best,
            "words": engine.trees_in_use(sampling),
            "hits": counts.hits / counts.asked if counts.asked else None,
            "per_s": {way: [per_s(done[way]), per_s(done[way][1:])] for way in ways},
        }))  # fmt: skip


def per_s(texts: list[Text]) -> float:
    """Tokens a second behind the first tokens."""
    return sum(len(text.token_ids) - 1 for text in texts) / max(1e-9, sum(text.decode_s for text in texts))


def main() -> None:
    """All situations, then their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an inflated checkpoint of the built-in target")
    parser.add_argument("--only", nargs="+", default=list(SITUATIONS), choices=list(OPTIONS))
    parser.add_argument("--prompts", type=Path, help="JSONL texts [held-out modules of the standard library]")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--sizes", type=int, nargs="+", default=FIXED, help="of fixed trees, in nodes")
    parser.add_argument("--temperature", type=float, default=SAMPLING.temperature)
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="do not measure one")
    parser.add_argument("--limit", default="1GiB", help="of the memory-limited situation")
    parser.add_argument(
        "--plain-every",
        type=int,
        default=1,
        metavar="N",
        help="let plain decoding take every Nth prompt alone: its speed changes little, and it is slow",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.prompts is None:
            arguments.prompts = write_prompts(Path(folder), arguments.num_prompts)
        for name in arguments.only:
            home = Path(folder) / name.replace(" ", "-").replace("/", "-")
            home.mkdir()
            options = [str(arguments.model), "--prompts", str(arguments.prompts), "--limit", arguments.limit,
                       "--new-tokens", str(arguments.new_tokens), "--temperature", str(arguments.temperature),
                       "--plain-every", str(arguments.plain_every), "--threads", str(arguments.threads),
                       "--child", name]  # fmt: skip
            options += ["--sizes", *map(str, arguments.sizes)]
            options += [] if arguments.profile else ["--no-profile"]
            run = subprocess.run([sys.executable, "-m", "scripts.check.tuned", *options], stdout=subprocess.PIPE,
                                 text=True, check=True, env={**os.environ, "EDGESPEC_HOME": str(home)})  # fmt: skip
            report = json.loads(run.stdout.splitlines()[-1])
            speeds, best = report["per_s"], report["best"]
            hits = "" if report["hits"] is None else f"; {report['hits']:.0%} of the experts asked for were in memory"
            print(f"\n{name}: {report['words']}{hits}")
            for way, (all_per_s, later_per_s) in speeds.items():
                print(f"{way:>12} {all_per_s:8.2f} tokens/s, {all_per_s / speeds['plain'][0]:.2f} of plain;", end=" ")
                print(f"from the second prompt on {later_per_s:8.2f}, {later_per_s / speeds[best][1]:.2f} of {best}")
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
