"""Another program takes a core for a while in the middle of texts: are they the same, and is the speed soon back?

    python -m scripts.check.disturbed --seconds 10

The built-in pair decodes the sample prompts again and again, with trees and threads that tune themselves, once
undisturbed and once with a busy loop beside it. Prints tokens/s before, meanwhile and after, how many steps the speed
took to come back, and whether the texts are equal; exits 1 where they are not, or where it took more than 20 steps.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from edgespec import Engine
from edgespec.cli.prompts.read import read_prompts
from edgespec.pair.pair import DEMO_FOLDER

WINDOW = 20  # steps
BACK = 0.9  # of the speed before
MAX_STEPS = 20


def decode(
    engine: Engine, prompts: list[str], *, seconds: float, tokens: int, disturbs: bool
) -> tuple[list[list[int]], list[tuple[float, int, float]]]:
    """Return the texts, and of each step its end, its tokens and its seconds; the middle third may be disturbed."""
    started, neighbour = time.perf_counter(), None
    texts: list[list[int]] = []
    steps: list[tuple[float, int, float]] = []
    try:
        for number in range(10_000):
            texts.append([])
            for chunk in engine.stream(prompts[number % len(prompts)], max_new_tokens=tokens, seed=number):
                elapsed_s = time.perf_counter() - started
                texts[-1] += chunk.token_ids
                if not chunk.step.is_prefill:
                    steps.append((elapsed_s, len(chunk.token_ids), chunk.step.total_s))
                if disturbs and neighbour is None and elapsed_s > seconds:
                    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                if neighbour is not None and elapsed_s > 2 * seconds:
                    neighbour.kill()
            if time.perf_counter() - started > 3 * seconds:
                return texts, steps
    finally:
        if neighbour is not None:
            neighbour.kill()
    return texts, steps


def per_s(steps: list[tuple[float, int, float]]) -> float:
    """Tokens a second of some steps."""
    return sum(tokens for _, tokens, _ in steps) / max(1e-9, sum(seconds for _, _, seconds in steps))


def main() -> int:
    """Both runs, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="before, meanwhile and after")
    parser.add_argument("--tokens", type=int, default=400, help="of every text")
    arguments = parser.parse_args()
    prompts = [row.prompt for row in read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)]
    runs = []
    for disturbs in (False, True):
        with Engine.from_pretrained() as engine:
            runs.append(decode(engine, prompts, seconds=arguments.seconds, tokens=arguments.tokens, disturbs=disturbs))
    (quiet, _), (disturbed, steps) = runs
    count = min(len(quiet), len(disturbed)) - 1  # the last ones may have been cut
    before = [step for step in steps if arguments.seconds / 3 < step[0] <= arguments.seconds]
    meanwhile = [step for step in steps if arguments.seconds < step[0] <= 2 * arguments.seconds]
    after = [step for step in steps if step[0] > 2 * arguments.seconds]
    usual = statistics.median(per_s(before[n : n + WINDOW]) for n in range(0, len(before) - WINDOW, WINDOW))
    back = next((n for n in range(len(after) - WINDOW) if per_s(after[n : n + WINDOW]) >= BACK * usual), len(after))
    is_same = quiet[:count] == disturbed[:count]
    print(f"{count} texts {'equal' if is_same else 'DIFFERENT'}")
    speeds = f"{per_s(before):.1f} before, {per_s(meanwhile):.1f} beside the other program, {per_s(after):.1f} after"
    print(f"tokens/s: {speeds}")
    print(f"{back} steps until {WINDOW} steps make {BACK} of the median of {usual:.1f} tokens/s before")
    return 0 if is_same and back <= MAX_STEPS else 1


if __name__ == "__main__":
    sys.exit(main())
