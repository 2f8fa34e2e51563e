"""What penalties, log-probabilities and grammars cost, plainly and with trees.

    python -m scripts.bench.settings --repeats 3

One process and one loaded pair: every repeat goes through all settings, with and without trees, on the same prompts,
so that a machine that slows down slows all of them. Trees have a fixed size: those that tune themselves would differ.
Printed are the milliseconds of a pass, growth included, and their share of those of the same repeat without a setting
(median, lowest and highest). That is what a setting costs; tokens a pass depend on what its texts are.
With one seed trees must give plain decoding's text: the script fails where they do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from edgespec import Engine, TreeSettings
from edgespec.engine import TextOptions

PROMPTS = ("def read_lines(path):", "class Queue:\n    def put(self, item):", "import os\n\ndef main(")
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["file", "folder"]}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 20}
SETTINGS: Mapping[str, TextOptions] = {
    "none": {},
    "repeat penalty": {"repetition_penalty": 1.2},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias of 8 tokens": {"logit_bias": dict.fromkeys(range(100, 108), -5.0)},
    "logprobs 5": {"logprobs": 5},
    "JSON schema": {"json_schema": SCHEMA},
    "grammar": {"grammar": 'root ::= [a-z \\n():,.="_]+\n'},
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tree-size", type=int, default=16)
    parser.add_argument("--temp", type=float, default=0.8)
    asked = parser.parse_args()
    trees = {"plain": TreeSettings(policy="none"), f"tree {asked.tree_size}": TreeSettings(size=asked.tree_size)}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {(name, mode): [] for mode in trees for name in SETTINGS}
    with Engine.from_pretrained(tree=TreeSettings(size=asked.tree_size), context_tokens=512) as engine:
        for repeat in range(-1, asked.repeats):  # the first warms up
            for name, options in SETTINGS.items():
                texts = []
                for mode, tree in trees.items():
                    row = measure(engine, tree, {**options, "temperature": asked.temp, "seed": 7}, asked.new_tokens)
                    texts.append(row["texts"])
                    if repeat >= 0:
                        found[name, mode].append(row)
                if texts[0] != texts[1]:
                    raise SystemExit(f"{name}: trees give another text than plain decoding")
    print(
        f"{'setting':<24}{'mode':<10}{'ms/pass':>9}{'share':>7}{'(lowest to highest)':>22}{'tok/pass':>10}{'tok/s':>8}"
    )
    for (name, mode), rows in found.items():
        shares = [row["pass_s"] / base["pass_s"] for row, base in zip(rows, found["none", mode], strict=True)]
        own = {
            key: statistics.median(row[key] for row in rows) for key in ("pass_s", "tokens_per_pass", "tokens_per_s")
        }
        spread = f"({min(shares):.2f} to {max(shares):.2f})"
        print(f"{name:<24}{mode:<10}{1000 * own['pass_s']:>9.2f}{statistics.median(shares):>7.2f}{spread:>22}"
              f"{own['tokens_per_pass']:>10.2f}{own['tokens_per_s']:>8.1f}")  # fmt: skip
    medians = [
        {"setting": name, "mode": mode, "pass_s": statistics.median(row["pass_s"] for row in rows)}
        for (name, mode), rows in found.items()
    ]
    print(json.dumps({"repeats": asked.repeats, "new_tokens": asked.new_tokens, "medians": medians}))
    return 0


def measure(engine: Engine, tree: TreeSettings, options: TextOptions, new_tokens: int) -> dict[str, Any]:
    """Return the texts of all prompts and what they took, without the prompts' own passes."""
    engine.use_tree(tree)
    results = [engine.generate(prompt, max_new_tokens=new_tokens, **options) for prompt in PROMPTS]
    decode_s = sum(result.total_s - result.time_to_first_token_s for result in results)
    passes = sum(len(result.passes) for result in results)
    tokens = sum(len(result.token_ids) - 1 for result in results)
    return {
        "texts": [result.token_ids for result in results],
        "pass_s": decode_s / passes,
        "tokens_per_pass": tokens / passes,
        "tokens_per_s": tokens / decode_s,
    }


if __name__ == "__main__":
    sys.exit(main())
