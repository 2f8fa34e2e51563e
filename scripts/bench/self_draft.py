"""A target's own low-bit copy as its draft against the built-in draft, over a simulated link.

    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.self_draft large                    bf16, no layer resident, 0.5 GiB/s
    python -m scripts.bench.self_draft --dtype float32          the built-in target itself

Each streamed layer takes its bytes' time at the link's speed, on the reader's thread: a pass waits as for a target
that does not fit. Every draft has an engine of its own, whose trees are held to `--size` nodes (and `--depth` layers)
under each policy; "tuned" trees size themselves. What is looked up is left out. Repeats go through all modes in turn,
and the medians are printed; so is whether the texts are plain decoding's where that is measured (`--plain`), which in
bf16 they need not be: rows of other numbers round otherwise. The last line is JSON.

An inflated checkpoint computes the built-in target's function: what it adds does nothing, and rounding that to few bits
does nothing either, but for blocks that hold both kinds. So its copy agrees about as often as the built-in target's
own. Of models of billions of trained weights SubSpec reports more (profiles/builtin/assumptions.toml).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from contextlib import ExitStack
from pathlib import Path

import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from profiles.measure import machine_facts
from scripts.bench.lookup import PLAIN, Found, found_of, tune_from
from scripts.situations import GIB, PROMPT_TOKENS, SEED, cut_texts, held_out_halves, throttle_edgespec

BUILT_IN = "built-in"


def measure(engine: Engine, tree: TreeSettings | None, prompts: list[str], *, new_tokens: int, temp: float) -> Found:
    """Decode the prompts with these trees, or with those that tune themselves."""
    engine.use_tree(tree)
    return found_of([engine.generate(text, max_new_tokens=new_tokens, temperature=temp, seed=SEED) for text in prompts])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--drafts", nargs="+", default=[BUILT_IN, "self:nf4"])
    parser.add_argument("--policies", nargs="+", default=["adaptive", "tuned"])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("-n", "--new-tokens", type=int, default=96)
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--link-gib-per-s", type=float, default=0.5)
    parser.add_argument("--resident", type=int, default=0, help="layers that stay")
    parser.add_argument("--plain", action="store_true", help="measure plain decoding too")
    arguments = parser.parse_args()
    throttle_edgespec(arguments.link_gib_per_s * GIB)
    prompts = cut_texts(held_out_halves()[1], count=arguments.texts, tokens=PROMPT_TOKENS, seed=SEED)
    largest = TreeSettings(size=arguments.size, depth=arguments.depth, lookup=False)
    shared = {
        "limits": MemoryLimits(max_resident_layers=arguments.resident),
        "dtype": arguments.dtype,
        "context_tokens": 1024,
    }
    report = []
    with ExitStack() as stack:
        modes: dict[str, tuple[Engine, TreeSettings | None]] = {}
        for name in arguments.drafts:
            pair = open_pair(arguments.target, DEMO_FOLDER / "draft" if name == BUILT_IN else Path(name))
            held = stack.enter_context(Engine.from_pair(pair, tree=largest, **shared))
            if arguments.plain and not modes:
                modes[PLAIN] = (held, TreeSettings(policy="none"))
            for policy in arguments.policies:
                if policy == "tuned":
                    tuned = stack.enter_context(Engine.from_pair(pair, **shared))
                    own = dataclasses.replace(tuned.trees.own, lookup=False)
                    modes[f"{name} tuned"] = (tune_from(tuned, own), None)
                else:
                    modes[f"{name} {policy} {arguments.size}"] = (held, dataclasses.replace(largest, policy=policy))
        for temp in arguments.temps:
            report += table(modes, prompts, temp, arguments)
    facts = dataclasses.asdict(machine_facts(torch.device("cpu")))
    print(json.dumps({"machine": facts, "arguments": {**vars(arguments), "target": str(arguments.target)},
                      "rows": report}))  # fmt: skip


def table(
    modes: dict[str, tuple[Engine, TreeSettings | None]], prompts: list[str], temp: float, arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Measure all modes at a temperature, print them, and return them."""
    found: dict[str, list[Found]] = {name: [] for name in modes}
    for _ in range(arguments.repeats):
        for name, (engine, tree) in modes.items():
            found[name].append(measure(engine, tree, prompts, new_tokens=arguments.new_tokens, temp=temp))
    print(f"\ntemperature {temp:g}: {'mode':<24}{'tok/pass':>9}{'tok/s':>8}{'growing':>9}  texts")
    rows = []
    plain = found.get(PLAIN)
    for name, own in found.items():
        row = {
            "temperature": temp,
            "mode": name,
            "tokens_per_pass": round(statistics.median(one.per_pass for one in own), 3),
            "tokens_per_s": round(statistics.median(one.per_s for one in own), 3),
            "growing_share": round(statistics.median(one.grow_s / one.decode_s for one in own), 3),
            "is_plain_text": None if plain is None else own[-1].texts == plain[-1].texts,
        }
        rows.append(row)
        texts = {None: "", True: "as plain", False: "another than plain"}[row["is_plain_text"]]  # type: ignore[index]
        print(
            f"{'':<{len(f'temperature {temp:g}: ')}}{name:<24}{row['tokens_per_pass']:>9.2f}{row['tokens_per_s']:>8.2f}"
            f"{row['growing_share']:>9.0%}  {texts}"
        )
    return rows


if __name__ == "__main__":
    main()
