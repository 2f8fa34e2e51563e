"""Count the texts that trees and plain decoding have in common, in the numbers that people run.

    python -m scripts.check.equal_texts MODEL                                   bf16, its weights as they are
    python -m scripts.check.equal_texts MODEL --quants none int4 nf4 --sizes 4 16
    python -m scripts.check.equal_texts MODEL -md DRAFT HEAD --policies all --num-prompts 20
    python -m scripts.check.equal_texts MODEL.gguf -md none --parallel 16 --streamed     passes of many rows

Both ways get the same prompts and seeds. `--policies` compares trees of these, with children that follow the text's
noise; a policy that only samples is compared at temperature 0, where there is one text. Exits 1 when a text differs: in
bf16 a single bit in a sum may decide a near tie, so all of a text's sums have to be made in plain decoding's order.
Plain texts are decoded one by one, the others --parallel at a time. Without a draft trees grow of looked up text.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.hub.names import NO_DRAFT
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.tree.policies import POLICIES
from scripts.situations import exit_with

WORDS = (
    "the river wind stone light door green walk small house under over bread morning said never blue deep long quiet "
    "def return import for in while class print"
)
BRANCHING = (3, 2, 1)  # of shapes that are named by it
LEAST_NODES = 16  # that there is memory for: those of the shape and more
Texts = list[tuple[int, ...]]


def prompts_of(count: int) -> list[str]:
    """Return prompts of twelve words each."""
    draw, words = random.Random(0), WORDS.split()
    return [" ".join(draw.choice(words) for _ in range(12)) for _ in range(count)]


def trees_of(arguments: argparse.Namespace, temperature: float) -> dict[str, TreeSettings]:
    """Return the trees that are compared: the default ones, or those of some policies."""
    names = [name for name, policy in POLICIES.items() if policy.kind != "none" and name != "static"]
    if not arguments.policies:
        if arguments.draft_model == [NO_DRAFT]:
            return {f"lookup, {size} nodes": TreeSettings(policy="lookup", size=size) for size in arguments.sizes}
        return {f"{size} nodes": TreeSettings(size=size, lookup=False) for size in arguments.sizes}
    found = {}
    for name in names if arguments.policies == ["all"] else arguments.policies:
        policy = POLICIES[name]
        if temperature > 0 and "coupled" not in policy.draws:
            continue
        limits: dict[str, Any] = {"draw": "coupled"} if "coupled" in policy.draws and len(policy.draws) > 1 else {}
        if "branching" in policy.settings:
            found[name] = TreeSettings(policy=name, branching=BRANCHING, **limits)
            continue
        for size in arguments.sizes if policy.budget else [0]:
            budget = {policy.budget: size} if policy.budget else {}
            found[f"{name}, {size} nodes"] = TreeSettings(policy=name, **budget, **limits)
    return found


def texts(engine: Engine, arguments: argparse.Namespace, tree: TreeSettings, temperature: float) -> Texts:
    """Return the tokens of each prompt's text."""
    engine.use_tree(tree)
    requests = [
        engine.request(prompt, max_new_tokens=arguments.new_tokens, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts_of(arguments.num_prompts))
    ]
    if tree.policy == "none":
        return [dict(engine.generate_many([request]))[0].token_ids for request in requests]
    results = dict(engine.generate_many(requests))
    return [results[number].token_ids for number in range(len(requests))]


def num_different(
    arguments: argparse.Namespace, quant: str, draft: Path, plain: dict[float, Texts], *, largest: TreeSettings
) -> int:
    """Print a line a temperature and tree; return how many texts differ. `plain` is filled by the first draft."""
    different = 0
    pair = open_pair(arguments.model, draft)
    limits = MemoryLimits(max_resident_layers=0) if arguments.streamed else MemoryLimits()
    with Engine.from_pair(
        pair, dtype=arguments.dtype, quant=quant, tree=largest, threads=arguments.threads, limits=limits,
        parallel=arguments.parallel,
    ) as engine:  # fmt: skip
        for temperature in arguments.temperatures:
            if temperature not in plain:
                plain[temperature] = texts(engine, arguments, TreeSettings(policy="none", lookup=False), temperature)
            for name, tree in trees_of(arguments, temperature).items():
                pairs = zip(texts(engine, arguments, tree, temperature), plain[temperature], strict=True)
                equal = sum(one == other for one, other in pairs)
                different += arguments.num_prompts - equal
                drafted = f", {draft.name}" if len(arguments.draft_model) > 1 else ""
                print(
                    f"{arguments.dtype}, {quant}{drafted}, temperature {temperature:g}, {name}: "
                    f"{equal} of {arguments.num_prompts} texts equal",
                    flush=True,
                )
    return different


def main() -> int:
    """Print one line for each format, temperature and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path, nargs="+", default=[DEMO_FOLDER / "draft"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quants", nargs="+", default=["none"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16])
    parser.add_argument("--policies", nargs="+", choices=["all", *POLICIES], help="[the default one]")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="texts under way together")
    parser.add_argument("--streamed", action="store_true", help="let no layer stay in memory")
    arguments = parser.parse_args()
    different = 0
    size = max(LEAST_NODES, *arguments.sizes)
    has_draft = arguments.draft_model != [NO_DRAFT]
    largest = TreeSettings(policy="opt-tree", size=size) if has_draft else TreeSettings(policy="lookup", size=size)
    for quant in arguments.quants:
        plain: dict[float, Texts] = {}
        for draft in arguments.draft_model:
            different += num_different(arguments, quant, draft, plain, largest=largest)
    return int(different > 0)


if __name__ == "__main__":
    exit_with(main)
