"""Is the profile's plan the best setting there is, and as fast as predicted? In several situations.

    python -m scripts.make.inflate /tmp/1b --params 1B
    python -m scripts.check.plan /tmp/1b

Situations: the built-in pair; the given checkpoint warm (all layers resident), cold (no layer is ever found
in the page cache), under a memory limit, and over a simulated link of two speeds. In each, a process of its
own runs `edgespec profile`, then `edgespec generate`, which finds the plan by itself: predicted against
measured tokens/s. Then it takes real steps of every setting of a grid, policies x sizes, in turn along one
text: milliseconds a step. Tokens a pass of each setting are exact expectations on the built-in pair, all
settings at the same points of the same texts: an inflated checkpoint computes the same function. Every text
is continued to the same length, as `generate` does, so that one which is guessed well counts for the few passes
that it takes. A setting's speed is those tokens over those milliseconds.

The fastest of 47 is also the luckiest, so the best few meet the plan and plain decoding in a final: other
continuations of the texts, more of them. Ratios are those of the final.
Prints a table a situation, and one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scipy.stats import trim_mean

import edgespec.cli
from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.config import parse_size
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.grow.batched import grown
from edgespec.grow.policies import OpenPolicy, make_grow, open_policy
from edgespec.measured import acceptance_of
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.placement.pair_profile import tree_settings
from edgespec.sampling.noise import TextNoise
from edgespec.train.records import expected_tokens
from edgespec.tree.policies import POLICIES
from edgespec.tree.token_tree import TokenTree
from edgespec.tune.measuring_tree import widest_tree
from edgespec.tune.samples import Text, start_text
from edgespec.tune.timings import run_steps
from edgespec.verify import accept_alone
from edgespec.verify.rows import TargetRows, refuse_nan
from edgespec.verify.rules import verifier
from edgespec.verify.walk import verify_coupled
from profiles.files import read_profile
from scripts.bench.offload import drop_behind_reader, throttle_edgespec
from scripts.make.demo_fits import cut_texts, held_out_halves

GIB = 1 << 30
BUDGETED = {policy.name: policy.budget for policy in POLICIES.values() if policy.budget is not None}
SIZES = (1, 4, 8, 16, 32, 64, 256)
CHAINS = (1, 4, 8, 16)
SAMPLING = SamplingSettings(temperature=0.8, top_p=0.95)  # the built-in pair's own
PROMPT_TOKENS = 160
FAST_STEPS = 48  # in a row where steps take milliseconds, in the loop that decodes: its caches, its time between passes
FINALISTS = 5
NEW_TOKENS = 600  # of all settings' steps along one text
SEED = 7
GRID_TOKENS = 16  # of each text
FINAL_SEEDS = (1007, 2007)  # of as many continuations of each text
TRIMMED = 0.1  # of the final's steps, on either side
SITUATIONS: dict[str, list[str]] = {
    "built-in": [],
    "warm": ["--dtype", "bfloat16"],
    "cold": ["--dtype", "bfloat16", "-ngl", "0"],
    "limit": ["--dtype", "bfloat16", "--max-cpu-mem", "LIMIT"],
    "link 2 GiB/s": ["--dtype", "bfloat16", "-ngl", "0"],
    "link 0.5 GiB/s": ["--dtype", "bfloat16", "-ngl", "0"],
}

Entries = dict[str, tuple[TreeSettings, AcceptanceModel]]


def grid() -> dict[str, TreeSettings]:
    """Every fixed setting by name."""
    found = {"none": TreeSettings(policy="none")}
    for policy, budget in BUDGETED.items():
        for size in SIZES if budget == "size" else CHAINS:
            found[f"{policy} {size}"] = TreeSettings(policy=policy, **{budget: size})  # type: ignore[arg-type]
    return found


def run_child(name: str, arguments: argparse.Namespace) -> None:
    """One situation; the last line on stdout is what was found."""
    torch.set_num_threads(arguments.threads)
    options = [arguments.limit if part == "LIMIT" else part for part in SITUATIONS[name]]
    if name != "built-in":
        options = ["-m", str(arguments.model), "-md", str(DEMO_FOLDER / "draft"), *options]
    pair = open_pair(None if name == "built-in" else arguments.model, DEMO_FOLDER / "draft")
    if name == "cold":
        drop_behind_reader(pair)
    if name.startswith("link"):
        throttle_edgespec(float(name.split()[1]) * GIB)
    home = Path(os.environ["EDGESPEC_HOME"])
    prompts = ["--prompts", str(arguments.prompts)]
    started = time.perf_counter()
    shown = captured(["profile", *options, *prompts, "--temps", str(SAMPLING.temperature)])
    profile_s = time.perf_counter() - started
    profile = read_profile(next((home / "profiles").glob("*.toml")))
    sys.stderr.write(shown)
    texts = home / "some.jsonl"
    texts.write_text(
        "".join(arguments.prompts.read_text(encoding="utf-8").splitlines(keepends=True)[: arguments.texts])
    )
    said = captured(["generate", str(texts), *options, "-n", str(arguments.new_tokens), "--seed", str(SEED),
                     "-o", str(home / "out.jsonl")])  # fmt: skip
    records = [json.loads(line) for line in (home / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens = sum(record["usage"]["completion_tokens"] - 1 for record in records)
    seconds = sum(record["timings"]["decode_s"] for record in records)
    plan = profile.plans[0]
    report = {
        "situation": name,
        "profile_s": profile_s,
        "profile": profile.name,
        "says": [line for line in said.splitlines() if line.startswith("profile ")],
        "plan": {"policy": plan.best.policy, "draw": plan.best.draw, "size": plan.best.size,
                 "depth": plan.best.depth, "threshold": plan.best.threshold,
                 "branching": list(plan.best.branching)},
        "why": plan.why,
        "predicted_per_s": plan.best.tokens_per_s,
        "measured_per_s": tokens / seconds,
        "predicted_tokens": plan.best.tokens,
        "measured_tokens": statistics.mean(n for record in records for n in record["spec"]["accept_lengths"]),
        **speeds(name, pair, (tree_settings(plan.best), acceptance_of(profile)), arguments),
    }  # fmt: skip
    print(json.dumps(report))


def speeds(
    name: str, pair: Any, plan: tuple[TreeSettings, AcceptanceModel], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Seconds a step of the grid; seconds a step and tokens a pass of the finalists."""
    entries: Entries = {label: (tree, default_acceptance()) for label, tree in grid().items()}
    texts = [pair.tokenizer.encode(text) for text in read_texts(arguments.prompts)]
    found = step_seconds(name, pair, entries, texts[:1], arguments.rounds, arguments)
    grid_s = {label: statistics.median(seconds) for label, seconds in found.items()}
    tokens = json.loads(arguments.tokens.read_text(encoding="utf-8"))
    fastest = sorted(grid_s, key=lambda label: tokens[label] / grid_s[label])[-FINALISTS:]
    final = {label: entries[label] for label in dict.fromkeys([*fastest, "none"])}
    if plan[0].policy != "none":
        final["plan"] = plan
    found = step_seconds(name, pair, final, texts, arguments.final_rounds, arguments)
    final_s = {label: float(trim_mean(seconds, TRIMMED)) for label, seconds in found.items()}
    final_tokens = exact_tokens(final, arguments.prompts, new_tokens=arguments.new_tokens, seeds=FINAL_SEEDS)
    return {
        "grid_s": grid_s,
        "final_s": {"plan": final_s["none"], **final_s},
        "final_tokens": {"plan": final_tokens["none"], **final_tokens},
    }


def captured(command: list[str]) -> str:
    """What a command printed on both streams; ends the script where it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = edgespec.cli.run(command)
    if code:
        raise SystemExit(f"edgespec {' '.join(command)}: exit code {code}\n{out.getvalue()}")
    return out.getvalue()


def read_texts(prompts: Path) -> list[str]:
    """The prompts."""
    return [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]


def step_seconds(
    name: str, pair: Any, entries: Entries, texts: list[list[int]], rounds: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each setting's steps, all in turn, a text a round."""
    limits = {"-ngl": None, "--max-cpu-mem": None} | dict(
        zip(SITUATIONS[name][::2], SITUATIONS[name][1::2], strict=True)
    )
    widest = widest_tree(max(SIZES))
    in_a_row = name == "built-in"
    longest = max(map(len, texts))
    seconds: dict[str, list[float]] = {label: [] for label in entries}
    with Engine.from_pair(
        pair,
        tree=widest,
        limits=MemoryLimits(
            max_resident_layers=0 if limits["-ngl"] else None,
            max_cpu_bytes=parse_size(arguments.limit) if limits["--max-cpu-mem"] else None,
        ),
        dtype=limits.get("--dtype") or "auto",
        context_tokens=longest + 600 + NEW_TOKENS,
        prompt_tokens=longest,
    ) as engine:
        generator, shuffled = torch.Generator().manual_seed(SEED), random.Random(SEED)
        for number in range(rounds + 1):
            ids = texts[number % len(texts)]
            order = list(entries)
            shuffled.shuffle(order)  # what a step leaves in the caches is not always the same neighbour's
            policies = {label: open_policy(entries[label][0]).with_acceptance(entries[label][1]) for label in order}
            if in_a_row:
                found = {label: loop_seconds(engine, ids, policy, SEED + number) for label, policy in policies.items()}
            else:
                found = alternating_seconds(engine, ids, policies, widest, generator)
            if number > 0:  # the first round warms up
                for label, more in found.items():
                    seconds[label] += more
    return seconds


def loop_seconds(engine: Engine, ids: list[int], policy: OpenPolicy, seed: int) -> list[float]:
    """Seconds of steps in a row, without the first of them."""
    steps = run_steps(engine, ids, policy, sampling=SAMPLING, steps=1 + FAST_STEPS, seed=seed)
    return [step.total_s for step in steps[1:]]


def alternating_seconds(
    engine: Engine, ids: list[int], policies: dict[str, OpenPolicy], widest: TreeSettings, generator: torch.Generator
) -> dict[str, list[float]]:
    """Seconds of a step of each along one text."""
    text = start_text(engine, ids, sampling=SAMPLING, tree=widest, generator=generator)
    noise = TextNoise(seed=0, key=0, vocab=text.target.vocab, device=engine.device)
    noise.start(len(ids))  # the root's position
    root, seconds = text.root, {}
    for label, policy in policies.items():
        started = time.perf_counter()
        grown = grown_tree(text, root, policy, engine, generator, noise)
        hidden = text.target.look(grown)
        refuse_nan(hidden.amax(-1))
        rows = TargetRows(hidden, text.target.logits, SAMPLING, vocab=text.target.vocab)
        root, _ = take_step(text, root, grown, rows, policy, generator, noise)
        seconds[label] = [time.perf_counter() - started]
    return seconds


def exact_tokens(entries: Entries, prompts: Path, *, new_tokens: int, seeds: Sequence[int]) -> dict[str, float]:
    """Exact expectations of every setting's tokens a pass, at the same points of the same texts.

    Nothing is timed meanwhile, so that every core may count.
    """
    places = list(itertools.product(seeds, range(len(read_texts(prompts)))))
    num_workers = os.cpu_count() or 1
    count = functools.partial(tokens_at, entries, prompts, new_tokens)
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as workers:
        parts = list(workers.map(count, [places[number::num_workers] for number in range(num_workers)]))
    return {label: statistics.mean(itertools.chain(*(part[label] for part in parts))) for label in entries}


def tokens_at(
    entries: Entries, prompts: Path, new_tokens: int, places: Sequence[tuple[int, int]]
) -> dict[str, list[float]]:
    """Expected tokens of every setting at each point of some texts, which seeds and numbers of prompts name."""
    torch.set_num_threads(1)
    pair, texts = open_pair(None, None), read_texts(prompts)
    tokens: dict[str, list[float]] = {label: [] for label in entries}
    widest = widest_tree(max(SIZES))
    with Engine.from_pair(pair, tree=widest, self_check=False) as engine:
        for seed, number in places:
            generator = torch.Generator().manual_seed(seed + number)
            ids = pair.tokenizer.encode(texts[number])
            text = start_text(engine, ids, sampling=SAMPLING, tree=widest, generator=generator)
            noise = TextNoise(seed=seed, key=number, vocab=text.target.vocab, device=engine.device)
            noise.start(len(ids))  # the root's position
            root, count = text.root, 0
            while count < new_tokens:
                drawn_from = generator.get_state()
                for label, (tree, model) in entries.items():
                    generator.set_state(drawn_from)  # the same luck for all
                    policy = open_policy(tree).with_acceptance(model)
                    grown = grown_tree(text, root, policy, engine, generator, noise)
                    rows = TargetRows(text.target.look(grown), text.target.logits, SAMPLING, vocab=text.target.vocab)
                    if policy.draw == "coupled":  # the noise decides, the same for all
                        tokens[label].append(1.0 + len(accept_alone(verify_coupled(grown, rows, noise)).path))
                    else:
                        tokens[label].append(expected_tokens(grown, rows.all_probs()) if grown.num_nodes > 1 else 1.0)
                # The last setting's tree goes on with the text, as a real step would.
                root, num_tokens = take_step(text, root, grown, rows, policy, generator, noise)
                count += num_tokens
    return tokens


def grown_tree(
    text: Text, root: int, policy: OpenPolicy, engine: Engine, generator: torch.Generator, noise: TextNoise
) -> TokenTree:
    """The policy's tree behind the text."""
    tree = policy.settings
    drafter = None if tree.policy == "none" else text.drafting(tree, SAMPLING)
    grow = make_grow(policy, drafter, sampling=SAMPLING, device=engine.device, generator=generator, noise=noise)
    return grown(grow(root, tree.num_layers), drafter)


def take_step(
    text: Text,
    root: int,
    grown: TokenTree,
    rows: TargetRows,
    policy: OpenPolicy,
    generator: torch.Generator,
    noise: TextNoise,
) -> tuple[int, int]:
    """Verify and commit; the next root, and how many tokens longer the text is with it."""
    accepted = accept_alone(verifier(SAMPLING, policy.draw, noise)(grown, rows, generator))
    noise.advance(len(accepted.path) + 1)
    path = torch.tensor(accepted.path, dtype=torch.long)
    text.target.commit(accepted.path)
    text.drafter.commit(root, grown.draft_rows[path].tolist(), grown.tokens[path].tolist())
    return accepted.next_token, len(accepted.path) + 1


def print_situation(report: dict[str, Any], tokens: dict[str, float]) -> dict[str, float]:
    """The table of one situation; its ratios."""
    name = report["situation"]
    per_s = {label: tokens[label] / seconds for label, seconds in report["grid_s"].items()}
    final = {label: report["final_tokens"][label] / seconds for label, seconds in report["final_s"].items()}
    best = max((label for label in final if label != "plan"), key=lambda label: final[label])
    plan = report["plan"]
    shape = f"{plan['policy']} {plan['draw'] or ''} size {plan['size']} depth {plan['depth']}"
    print(f"\n{name}: profile in {report['profile_s']:.0f} s; plan {shape} threshold {plan['threshold']:.3g}")
    ratio = report["measured_per_s"] / report["predicted_per_s"]
    print(
        f"  predicted {report['predicted_per_s']:.2f} tokens/s, generate measured {report['measured_per_s']:.2f}: "
        f"{ratio:.2f}; tokens a pass {report['predicted_tokens']:.2f}, {report['measured_tokens']:.2f}"
    )
    print(f"{'':>12}" + "".join(f"{size:>8}" for size in SIZES))
    for policy in BUDGETED:
        cells = [per_s.get(f"{policy} {size}") for size in SIZES]
        print(f"{policy:>12}" + "".join(f"{'' if cell is None else f'{cell:.2f}':>8}" for cell in cells))
    print(f"{'none':>12}{per_s['none']:>8.2f}")
    finalists = ", ".join(f"{label} {speed:.2f}" for label, speed in sorted(final.items(), key=lambda item: -item[1]))
    print(f"  final: {finalists}")
    plan_per_s = final["plan"]
    print(f"  plan: {plan_per_s / final[best]:.3f} of the best ({best}), {plan_per_s / final['none']:.2f} times none")
    return {
        "measured_over_predicted": ratio,
        "plan_over_best": plan_per_s / final[best],
        "plan_over_none": plan_per_s / final["none"],
    }


def write_prompts(folder: Path, count: int) -> Path:
    """A file of passages from held-out modules that nothing was fitted on."""
    path = folder / "prompts.jsonl"
    texts = cut_texts(held_out_halves()[1], count=count, tokens=PROMPT_TOKENS, seed=SEED)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def main() -> None:
    """The tokens of every setting, then all situations, then the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an inflated checkpoint of the built-in target")
    parser.add_argument("--situations", nargs="+", default=list(SITUATIONS), choices=list(SITUATIONS))
    parser.add_argument("--prompts", type=Path, help="JSONL texts [held-out modules of the standard library]")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--texts", type=int, default=24, help="of them, to generate from")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each setting that are timed")
    parser.add_argument("--final-rounds", type=int, default=20, help="steps of each finalist that are timed")
    parser.add_argument("--limit", default="1GiB", help="of the memory-limited situation")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument(
        "--tokens", type=Path, help="keep the grid's tokens a pass here; read, not counted, if it exists"
    )
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.prompts is None:
            arguments.prompts = write_prompts(Path(folder), arguments.num_prompts)
        arguments.tokens = arguments.tokens or Path(folder) / "tokens.json"
        if not arguments.tokens.exists():
            entries = {label: (tree, default_acceptance()) for label, tree in grid().items()}
            counted = exact_tokens(entries, arguments.prompts, new_tokens=GRID_TOKENS, seeds=[SEED])
            arguments.tokens.write_text(json.dumps(counted), encoding="utf-8")
        tokens = json.loads(arguments.tokens.read_text(encoding="utf-8"))
        reports, ratios = [], {}
        for name in arguments.situations:
            print(f"situation: {name}", file=sys.stderr)
            names = (
                "texts",
                "new_tokens",
                "rounds",
                "final_rounds",
                "limit",
                "threads",
                "prompts",
                "tokens",
            )
            options = [part for key in names for part in (f"--{key.replace('_', '-')}", str(getattr(arguments, key)))]
            home = Path(folder) / name.replace(" ", "-").replace("/", "-")
            home.mkdir()
            done = subprocess.run(
                [sys.executable, "-m", "scripts.check.plan", str(arguments.model), *options, "--child", name],
                stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "EDGESPEC_HOME": str(home)},
            )  # fmt: skip
            reports.append(json.loads(done.stdout.splitlines()[-1]))
            ratios[name] = print_situation(reports[-1], tokens)
            sys.stdout.flush()
    print(json.dumps({"ratios": ratios, "tokens": tokens, "reports": reports, "threads": arguments.threads}))


if __name__ == "__main__":
    main()
