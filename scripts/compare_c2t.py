"""C2T against EAGLE-2 on the same draft: nodes verified at equal accepted length.

    python -m scripts.compare_c2t --contexts 200

Both at temperature 0, 15 tokens a layer, at most 11 layers (C2T, section 5). EAGLE-2's curve comes from
reranking to different sizes, C2T's from different confidences; nodes at a length are read off by linear
interpolation. Prints both curves, the ratio at lengths that both reach, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy
import torch

from edgespec import SamplingSettings, TreeSettings
from scripts.compare_policies import Bench, Cell, contexts

DEPTH = 11
WIDTH = 15
SIZES = [8, 16, 24, 32, 48, 64, 96, 128, 192]
CONFIDENCES = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--classifier", type=Path, help="[default: the built-in pair's]")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--contexts", type=int, default=200)
    parser.add_argument("--context-tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.model, arguments.draft_model, arguments.seed)
    texts = contexts(bench.engine.pair.tokenizer, arguments.text, count=arguments.contexts,
                     tokens=arguments.context_tokens, seed=arguments.seed)  # fmt: skip
    settings = {
        f"eagle2 {size}": TreeSettings(policy="eagle2", size=size, depth=DEPTH, max_children=WIDTH) for size in SIZES
    } | {
        f"c2t {confidence}": TreeSettings(
            policy="c2t", size=768, depth=DEPTH, max_children=WIDTH, confidence=confidence,
            classifier=arguments.classifier,
        )
        for confidence in CONFIDENCES
    }  # fmt: skip
    cells = {name: Cell() for name in settings}
    sampling = SamplingSettings(temperature=0)
    for index, ids in enumerate(texts):
        bench.start(ids)
        drafter = bench.drafter(settings[f"eagle2 {SIZES[0]}"], sampling)
        for name, tree in settings.items():
            bench.step(tree, sampling, drafter, cells[name], index)
    curves: dict[str, list[tuple[float, float]]] = {"eagle2": [], "c2t": []}
    for name, cell in cells.items():
        tokens, nodes = statistics.mean(cell.tokens), statistics.mean(cell.nodes)
        curves[name.split()[0]].append((tokens, nodes))
        print(f"{name:14}{tokens:>8.3f} tokens a pass{nodes:>8.1f} nodes")
    low = max(min(curve)[0] for curve in curves.values())
    high = min(max(curve)[0] for curve in curves.values())
    ratios = {}
    for length in numpy.linspace(low, high, 6)[1:-1].tolist():
        nodes = {name: float(numpy.interp(length, *zip(*sorted(curve), strict=True))) for name, curve in curves.items()}
        ratios[f"{length:.3f}"] = nodes["c2t"] / nodes["eagle2"]
        print(f"at {length:.2f} tokens a pass: eagle2 {nodes['eagle2']:.1f} nodes, c2t {nodes['c2t']:.1f}: "
              f"{ratios[f'{length:.3f}'] - 1:+.1%}")  # fmt: skip
    print(json.dumps({"curves": curves, "ratios": ratios, "contexts": len(texts)}))


if __name__ == "__main__":
    main()
