"""Count the texts that trees and plain decoding have in common, in the numbers that people run.

    python -m scripts.check.equal_texts MODEL                                   bf16, its weights as they are
    python -m scripts.check.equal_texts MODEL --quants none int4 nf4 --sizes 4 16

Both ways get the same prompts and seeds. Exits 1 when a text differs: in bf16 a single bit in a sum may decide a near
tie, so all of a text's sums have to be made in plain decoding's order.
"""

import argparse
import random
from pathlib import Path

from edgespec import Engine, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from scripts.situations import exit_with

WORDS = (
    "the river wind stone light door green walk small house under over bread morning said never blue deep long quiet "
    "def return import for in while class print"
)


def prompts_of(count: int) -> list[str]:
    """Return prompts of twelve words each."""
    draw, words = random.Random(0), WORDS.split()
    return [" ".join(draw.choice(words) for _ in range(12)) for _ in range(count)]


def texts(arguments: argparse.Namespace, quant: str, tree: TreeSettings, temperature: float) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt's text."""
    pair = open_pair(arguments.model, arguments.draft_model)
    with Engine.from_pair(pair, dtype=arguments.dtype, quant=quant, tree=tree, threads=arguments.threads) as engine:
        return [
            tuple(
                engine.generate(
                    prompt, max_new_tokens=arguments.new_tokens, temperature=temperature, seed=seed
                ).token_ids
            )
            for seed, prompt in enumerate(prompts_of(arguments.num_prompts))
        ]


def main() -> int:
    """Print one line for each format, temperature and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path, default=DEMO_FOLDER / "draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quants", nargs="+", default=["none"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16])
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    different = 0
    for quant in arguments.quants:
        for temperature in arguments.temperatures:
            plain = texts(arguments, quant, TreeSettings(policy="none"), temperature)
            for size in arguments.sizes:
                found = texts(arguments, quant, TreeSettings(size=size, lookup=False), temperature)
                equal = sum(one == other for one, other in zip(found, plain, strict=True))
                different += len(plain) - equal
                print(
                    f"{arguments.dtype}, {quant}, temperature {temperature:g}, {size} nodes: "
                    f"{equal} of {len(plain)} texts equal",
                    flush=True,
                )
    return int(different > 0)


if __name__ == "__main__":
    exit_with(main)
