"""What verification takes of a large head: rows one by one, or those that are likely to be visited together.

    python -m scripts.papers.bench_head
    python -m scripts.papers.bench_head --shapes 1024x151936 --dtypes bfloat16 --sizes 8 64

The built-in pair writes texts; whenever its head makes rows, a random head of the given shape makes as
many, and that is what is timed. Both ways alternate. Prints medians over rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from edgespec import Engine, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.decode import accept
from edgespec.machine.device import DTYPES
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.verify.likely import likely_nodes

WAYS = {"one by one": lambda _tree, _most: (), "likely together": likely_nodes}


class LargeHead:
    """A head that is timed while it makes as many rows as another does."""

    def __init__(self, hidden: int, vocab: int, dtype: torch.dtype) -> None:
        self.weight = torch.randn(vocab, hidden, dtype=dtype)
        self.seconds, self.rows, self.reads = 0.0, 0, 0

    def beside(self, logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `logits`, which lets this head make rows, too."""

        def both(hidden: Tensor) -> Tensor:
            rows = torch.ones(hidden.shape[0], self.weight.shape[1], dtype=self.weight.dtype)
            start = time.perf_counter()
            torch.nn.functional.linear(rows, self.weight)
            self.seconds += time.perf_counter() - start
            self.rows += hidden.shape[0]
            self.reads += 1
            return logits(hidden)

        return both


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1024x151936", "4096x128256"], metavar="HIDDENxVOCAB")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=DTYPES)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("-n", "--max-new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    pair = open_pair(None, None)
    prompt = pair.tokenizer.encode(next(iter(read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False))).prompt)
    found = []
    for shape in arguments.shapes:
        for name in arguments.dtypes:
            head = LargeHead(*map(int, shape.split("x")), DTYPES[name])
            for size in arguments.sizes:
                with Engine.from_pair(
                    pair, tree=TreeSettings(size=size, lookup=False), device="cpu", dtype="float32"
                ) as engine:
                    found.append(
                        {"head": shape, "dtype": name, "nodes": size} | compare(engine, prompt, head, arguments)
                    )
                print(", ".join(f"{what} {value}" for what, value in found[-1].items()), flush=True)
            del head
    print(json.dumps(found))


def compare(engine: Engine, prompt: list[int], head: LargeHead, arguments: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds, reads and rows of a step, either way."""
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    engine.generate(prompt, max_new_tokens=2, seed=0)
    for seed in range(arguments.rounds):
        texts = set()
        for way, choose in WAYS.items():
            head.seconds, head.rows, head.reads, steps = 0.0, 0, 0, 0
            logits = engine.target_model.logits
            with patch.object(engine.target_model, "logits", head.beside(logits)), patch.object(
                accept, "likely_nodes", choose
            ):  # fmt: skip
                result = engine.generate(prompt, max_new_tokens=arguments.max_new_tokens, seed=seed)
            steps = len(result.passes)
            texts.add(result.text)
            found[way].append((head.seconds / steps * 1e3, head.reads / steps, head.rows / steps))
        assert len(texts) == 1
    return {
        f"{what}, {way}": round(statistics.median(column), 1)
        for way, rounds in found.items()
        for what, column in zip(("ms", "reads", "rows"), zip(*rounds, strict=True), strict=True)
    }


if __name__ == "__main__":
    main()
