"""Fit what ships with the built-in pair: measured acceptance, and C2T's classifier.

    python -m scripts.fit_demo_models --out edgespec/demo

Prompts are held-out modules of the standard library (those that the pair was not trained on) cut at
random points; every second module only, so that scripts/compare_policies.py compares on the others.
Runs `edgespec train` as a user would. Minutes for the first, half an hour of one core for the classifier's
trees of 1,010 nodes. `--only stop-hidden` and `--only stop-probabilities` fit decision models, of which none ships.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from edgespec.pair.pair import open_pair
from scripts.train_demo import is_held_out, standard_library_sources

SHIPPED = ("acceptance", "classifier")
PROMPTS = {"acceptance": 200, "classifier": 2250, "stop-hidden": 50, "stop-probabilities": 50}
NEW_TOKENS = {"acceptance": 24, "classifier": 8, "stop-hidden": 16, "stop-probabilities": 16}  # of every prompt


def held_out_halves() -> tuple[list[str], list[str]]:
    """Texts of held-out modules: to fit on, and to compare on."""
    texts = [text for name, text in standard_library_sources() if is_held_out(name)]
    return texts[::2], texts[1::2]


def cut_texts(texts: list[str], *, count: int, tokens: int, seed: int) -> list[str]:
    """So many passages of so many tokens, from anywhere."""
    tokenizer = open_pair(None, None).tokenizer
    streams = [ids for ids in (tokenizer.encode(text, verbose=False) for text in texts) if len(ids) > tokens]
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        ids = draw.choices(streams, weights=[len(stream) for stream in streams])[0]
        end = draw.randrange(tokens, len(ids) + 1)
        found.append(tokenizer.decode(ids[end - tokens : end]))
    return found


def main() -> None:
    """Fit all that ships, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("demo-records"), help="folder of prompts and records")
    parser.add_argument("--context-tokens", type=int, default=192)
    parser.add_argument("--only", choices=list(PROMPTS))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in [arguments.only] if arguments.only else SHIPPED:
        texts = cut_texts(held_out_halves()[0], count=PROMPTS[name], tokens=arguments.context_tokens, seed=7)
        prompts = arguments.work / f"{name}.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        what, _, kind = name.partition("-")
        command = ["train", what, *(["--kind", kind] if kind else []), "--prompts", prompts]
        output = arguments.out / f"{name}.{'safetensors' if kind else 'json'}"
        command += ["-o", output, "--overwrite", "--records", arguments.work / name]
        command += ["-n", NEW_TOKENS[name]]
        subprocess.run([sys.executable, "-m", "edgespec", *map(str, command)], check=True)


if __name__ == "__main__":
    main()
