"""One seed, one text: every tree must give the text that plain decoding gives with the same seed.

    python -m scripts.check.seed                       the built-in pair
    python -m scripts.check.seed -m TARGET -md DRAFT --sizes 1,16 -n 12

Texts are compared token by token, for coupled policies x tree sizes, greedily and at temperatures with and without
top-p, with all layers resident and with all of them streamed. Everything runs in float32. Prints a line a setting;
exits 1 when a text differs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.text.results import GenerationResult
from scripts.situations import exit_with

POLICIES = ("adaptive", "opt-tree", "eagle2", "c2t", "chain")
SAMPLINGS = {
    "T=0": SamplingSettings(),
    "T=0.6": SamplingSettings(temperature=0.6),
    "T=1": SamplingSettings(temperature=1.0),
    "T=0.6 top-p": SamplingSettings(temperature=0.6, top_p=0.95),
    "T=1 top-p": SamplingSettings(temperature=1.0, top_p=0.95),
    "T=0 penalties": SamplingSettings(repetition_penalty=1.2, frequency_penalty=0.5),
    "T=0.6 penalties": SamplingSettings(temperature=0.6, repetition_penalty=1.2, presence_penalty=0.8),
}
SEED = 7


def tree(policy: str, size: int) -> TreeSettings:
    """A policy's tree of so many nodes."""
    if policy == "chain":
        return TreeSettings(policy=policy, draw="coupled", draft_tokens=size)
    return TreeSettings(policy=policy, draw="coupled", size=size)


def texts(
    engine: Engine, prompts: list[list[int]], settings: TreeSettings, new_tokens: int
) -> dict[str, list[list[int]]]:
    """Every prompt's tokens, by sampling."""
    engine.use_tree(settings)
    found: dict[str, list[list[int]]] = {}
    for name, sampling in SAMPLINGS.items():
        requests = [
            engine.request(ids, max_new_tokens=new_tokens, sampling=sampling, seed=SEED, name=str(index))
            for index, ids in enumerate(prompts)
        ]
        ended = dict(engine.generate_many(requests))
        found[name] = [list(_result(ended[index]).token_ids) for index in range(len(prompts))]
    return found


def _result(ended: GenerationResult | Exception) -> GenerationResult:
    if isinstance(ended, Exception):
        raise ended
    return ended


def count_differences(found: dict[str, list[list[int]]], expected: dict[str, list[list[int]]]) -> int:
    """Print where texts differ."""
    different = 0
    for name, ours in found.items():
        for index, (text, plain) in enumerate(zip(ours, expected[name], strict=True)):
            if text != plain:
                different += 1
                at = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), len(plain))
                print(f"    {name}, prompt {index}: another token at place {at} of {len(plain)}")
    return different


def main() -> int:
    """Compare all settings; the number of differing texts decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--sizes", default="1,16,64,768")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-np", "--parallel", type=int, default=1, help="texts that share each pass [%(default)s]")
    arguments = parser.parse_args()

    pair = open_pair(arguments.model, arguments.draft_model)
    rows = read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)
    prompts = [pair.tokenizer.encode(rows[index % len(rows)].prompt) for index in range(arguments.prompts)]
    sizes = [int(size) for size in arguments.sizes.split(",")]
    trees = [tree(policy, size) for policy in arguments.policies.split(",") for size in sizes]
    expected: dict[str, list[list[int]]] = {}
    different = compared = 0
    for resident in (None, 0):
        with Engine.from_pair(
            pair,
            tree=max(trees, key=lambda one: one.num_drafted),  # the largest, which memory is planned for
            limits=MemoryLimits(max_resident_layers=resident),
            device=arguments.device,
            dtype="float32",
            parallel=arguments.parallel,
            context_tokens=max(map(len, prompts)) + arguments.max_new_tokens,
        ) as engine:
            streamed = engine.placement.num_layers - engine.placement.num_resident
            for one in (TreeSettings(policy="none"), *trees):
                started = time.perf_counter()
                found = texts(engine, prompts, one, arguments.max_new_tokens)
                expected = expected or found
                wrong = count_differences(found, expected)
                total = sum(map(len, found.values()))
                different, compared = different + wrong, compared + total
                name = f"{one.policy} {one.num_nodes or ''}, {streamed} layers streamed"
                print(
                    f"{name:<36}{total - wrong}/{total} texts equal   {time.perf_counter() - started:.0f} s", flush=True
                )
    print(f"{compared - different} of {compared} texts equal those of plain decoding")
    return min(different, 1)


if __name__ == "__main__":
    exit_with(main)
