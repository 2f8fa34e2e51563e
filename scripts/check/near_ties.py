"""Count the texts that rounding by rows turns, with `--exact` and without, on a pretended card.

    python -m scripts.check.near_ties                       2,000 texts of the built-in draft, as its own draft
    python -m scripts.check.near_ties --texts 200 --new 32 --size 16

Products round otherwise for other numbers of rows (`tests/support/rounding_by_rows.py`). Plain decoding of one row at a
time is compared with trees, and with trees whose near ties are decided by rows as in plain decoding: texts that differ,
how many choices were near ties, how many of these turned, rows read again, and seconds beside those of all steps. Exits
1 where a text of `--exact` differs.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

from edgespec import Engine, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.tuning.step import StepResult
from scripts.situations import exit_with
from tests.support.rounding_by_rows import rounding_by_rows

WORDS = "def return import for in while class self name value list dict with open as print if else try"
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
]  # fmt: skip
PLAIN = TreeSettings(policy="none")
Texts = list[tuple[int, ...]]


def decoded(arguments: argparse.Namespace, tree: TreeSettings, *, exact: bool) -> tuple[Texts, list[StepResult]]:
    """Return the tokens of all texts, and their passes."""
    draw = random.Random(0)

    def opened() -> Engine:
        return Engine.from_pretrained(
            arguments.model, draft=arguments.model, tree=tree, exact=exact, parallel=arguments.parallel,
            dtype="float32", device="cpu", context_tokens=256, threads=1,
        )  # fmt: skip

    with rounding_by_rows(opened) as engine:
        requests = (
            engine.request(
                " ".join(draw.choice(WORDS.split()) for _ in range(6)), max_new_tokens=arguments.new, seed=seed,
                ignore_eos=True, **WAYS[seed % len(WAYS)],
            )
            for seed in range(arguments.texts)
        )  # fmt: skip
        found = dict(engine.generate_many(requests))
    texts, steps = Texts(), list[StepResult]()
    for _, result in sorted(found.items()):
        if isinstance(result, Exception):
            raise result
        texts.append(result.token_ids)
        steps += result.passes
    return texts, steps


def main() -> int:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=DEMO_FOLDER / "draft")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--size", type=int, default=9)
    parser.add_argument("--parallel", type=int, default=16)
    arguments = parser.parse_args()
    tree, num_different = TreeSettings(size=arguments.size, lookup=False), 0  # the draft always grows
    plain, _ = decoded(arguments, PLAIN, exact=True)  # rows of several texts pass one by one
    for name, exact in (("trees", False), ("trees, exact", True)):
        started = time.perf_counter()
        found, steps = decoded(arguments, tree, exact=exact)
        seconds = time.perf_counter() - started
        num_different = sum(one != other for one, other in zip(found, plain, strict=True))
        again = [step for step in steps if step.num_read_again]
        decide_s = sum(step.decide_s / step.num_texts for step in steps)
        print(
            f"{name}: {num_different} of {len(plain)} texts differ from plain decoding's; "
            f"{sum(len(step.tokens) for step in steps) / len(steps):.2f} tokens a pass and text; "
            f"{len(again)} of {len(steps)} passes ended at a near tie, {sum(step.turned for step in again)} turned; "
            f"{sum(step.num_read_again for step in again)} rows read again, {decide_s:.1f} s of {seconds:.1f} s",
            flush=True,
        )
    return int(num_different > 0)


if __name__ == "__main__":
    exit_with(main)
