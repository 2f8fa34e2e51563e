"""What reading a long prompt costs beside a text that writes, in seconds of the processor, while weights stream.

    python -m scripts.bench.reading_cost model.gguf --tokens 2000
    python -m scripts.bench.reading_cost --tokens 12000 40000        a small random model with as long a context
    python -m scripts.bench.reading_cost ... --source ../other       the engine of another checkout

One thread in one process, so that programs beside it change little. A short text writes 48 tokens, and a long prompt
comes with it: prints, for each length, all tokens that are read and written over the processor's seconds, the median
of three.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgespec import Engine

SHORT_TOKENS, WRITTEN_TOKENS, REPEATS = 8, 48, 3
FIRST_ID, LAST_ID = 20, 1000


def tokens_per_s(engine: Engine, tokens: int) -> float:
    """Return the tokens of both texts for each second of the processor; the first texts pay for what is made once."""
    draws = random.Random(tokens)

    def ask(*sizes: tuple[int, int]) -> None:
        prompts = [([draws.randint(FIRST_ID, LAST_ID) for _ in range(count)], new) for count, new in sizes]
        handles = [
            engine.submit(engine.request(ids, max_new_tokens=new, temperature=0, ignore_eos=True), reuse=True)
            for ids, new in prompts
        ]
        for handle in handles:
            handle.result()

    for size in ((SHORT_TOKENS, 8), (700, 8), (SHORT_TOKENS, 8), (tokens, 1)):
        ask(size)
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        ask((SHORT_TOKENS, WRITTEN_TOKENS), (tokens, 1))
        seconds.append(time.process_time() - started)
    return (tokens + 1 + SHORT_TOKENS + WRITTEN_TOKENS) / statistics.median(seconds)


def main(given: Sequence[str] | None = None) -> None:
    """A line a length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=Path, nargs="?", help="a model with a long context; a small random one if left out"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000])
    parser.add_argument("--source", type=Path, help="a checkout whose engine is measured in the place of this one's")
    arguments = parser.parse_args(given)
    if arguments.source is not None:
        sys.path.insert(0, str(arguments.source.resolve()))
    from edgespec import Engine, MemoryLimits

    if arguments.source is not None:
        sys.path.pop(0)  # scripts and tests are this checkout's
    from scripts.bench.waiting import CONTEXT_BEYOND, small_model

    torch.set_num_threads(1)
    limits = MemoryLimits(max_resident_layers=0)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or small_model(Path(folder) / "small", max(arguments.tokens) + CONTEXT_BEYOND)
        for tokens in arguments.tokens:
            context = tokens + CONTEXT_BEYOND
            with Engine.from_pretrained(model, context_tokens=context, parallel=4, limits=limits) as engine:
                print(f"{tokens:7} {tokens_per_s(engine, tokens):8.0f} tokens a second of the processor", flush=True)


if __name__ == "__main__":
    main()
