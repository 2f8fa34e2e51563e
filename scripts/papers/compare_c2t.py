"""C2T against EAGLE-2 on the same draft: nodes verified at equal accepted length.

    python -m scripts.papers.compare_c2t --contexts 200
    python -m scripts.papers.compare_c2t --classifiers variants/*.json

Both at temperature 0, 15 tokens a layer, at most 11 layers (C2T, section 5). EAGLE-2's curve comes from reranking to
different sizes, C2T's from different confidences; nodes at a length are read off by linear interpolation. Prints the
curves, the ratio of nodes to EAGLE-2's and to the first classifier's, and one JSON line. Intervals are 95 % bootstraps
over contexts, which are the same for all.
"""

import argparse
import json
import multiprocessing
from pathlib import Path

import numpy
import torch
from torch import Tensor

from edgespec import SamplingSettings, TreeSettings
from edgespec.grow.classifier import DEFAULT_FILE
from edgespec.tree.token_tree import TokenTree
from scripts.papers.compare_policies import Bench, add_context_options, visit_contexts
from scripts.papers.tables.paper_table import in_words, markdown, resampled, with_interval

DEPTH = 11
WIDTH = 15
SIZES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192)
CONFIDENCES = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02, 0.01, 0.005)
NUM_LENGTHS = 4
GREEDY = SamplingSettings()
EAGLE2 = TreeSettings(policy="eagle2", size=max(SIZES), depth=DEPTH, max_children=WIDTH)


def c2t(classifier: Path, *, confidence: float) -> TreeSettings:
    """C2T's trees of a classifier. Those of higher confidence are part of those of lower."""
    return TreeSettings(policy="c2t", size=768, depth=DEPTH, max_children=WIDTH, confidence=confidence,
                        classifier=classifier)  # fmt: skip


def points_of(bench: Bench, number: int, classifiers: list[Path]) -> list[Tensor]:
    """The tokens of a pass and the nodes [points, 2] at a context: EAGLE-2's by size, then by confidence."""
    drafter = bench.drafter(EAGLE2, GREEDY)
    found = [torch.tensor(bench.values(EAGLE2, GREEDY, drafter, number, SIZES), dtype=torch.float64)]
    for classifier in classifiers:
        settings = c2t(classifier, confidence=min(CONFIDENCES))
        tree = bench.grow(settings, GREEDY, drafter, number, 0, torch.Generator())
        found.append(points_by_score(tree, bench.path(tree, GREEDY, number, 0)))
    return found


def points_by_score(tree: TokenTree, path: list[int]) -> Tensor:
    """The tokens of a pass, and the nodes below the root, of the nodes that reach each confidence: [points, 2]."""
    assert tree.scores is not None
    reaches = tree.scores[1:] >= torch.tensor(CONFIDENCES, dtype=tree.scores.dtype)[:, None]  # [points, n - 1]
    is_accepted = torch.zeros(tree.num_nodes, dtype=torch.bool)
    is_accepted[path] = True
    return torch.stack([1.0 + (reaches & is_accepted[1:]).sum(1), reaches.sum(1)], 1).double()


def run_part(part: int, arguments: argparse.Namespace) -> dict[int, list[Tensor]]:
    """The points of every context of one process."""
    return {
        number: points_of(bench, number, arguments.classifiers)
        for number, bench in visit_contexts(part, arguments)
    }  # fmt: skip


def nodes_at(lengths: list[float], means: Tensor) -> Tensor:
    """The nodes [..., lengths] of curves [..., points, 2] at some lengths; nan where a curve does not reach one."""
    curves = means.reshape(-1, *means.shape[-2:]).numpy()
    ordered = [curve[curve[:, 0].argsort(kind="stable")].T for curve in curves]
    nodes = [numpy.interp(lengths, *curve, left=numpy.nan, right=numpy.nan) for curve in ordered]
    return torch.from_numpy(numpy.stack(nodes)).reshape(*means.shape[:-2], len(lengths))


def compared(names: list[str], curves: list[Tensor]) -> list[str]:
    """A row a classifier: its nodes over EAGLE-2's at some lengths, at all of them, and those over the first one's.

    `curves` [contexts, points, 2] begin with EAGLE-2's. The lengths are those that it and the first classifier reach.
    """
    means = [curve.mean(0) for curve in curves]
    low = max(float(curve[:, 0].min()) for curve in means[:2])
    high = min(float(curve[:, 0].max()) for curve in means[:2])
    lengths: list[float] = numpy.linspace(low, high, NUM_LENGTHS + 2)[1:-1].tolist()
    # Of each curve, first as measured, then drawn anew: [1 + bootstraps, lengths].
    nodes = [
        nodes_at(lengths, torch.cat([mean[None], resampled(curve)])) for mean, curve in zip(means, curves, strict=True)
    ]
    at_lengths = [f"{count:.1f} nodes at {length:.2f}" for count, length in zip(nodes[0][0], lengths, strict=True)]
    table = [[names[0], *at_lengths, "all", "of the first's"]]
    for name, of_name in zip(names[1:], nodes[1:], strict=True):
        over_eagle2, over_first = of_name / nodes[0], (of_name / nodes[1]).log().mean(1).exp()
        columns = [*over_eagle2.unbind(1), over_eagle2.log().mean(1).exp(), over_first]
        table.append(
            [name, *("-" if column[0].isnan() else with_interval(column[0], column[1:]) for column in columns)]
        )
    return markdown(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_context_options(parser)
    parser.add_argument("--classifiers", type=Path, nargs="+", default=[DEFAULT_FILE], help="[the built-in pair's]")
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        parts = pool.starmap(run_part, [(part, arguments) for part in range(arguments.processes)])
    found = [points for _, points in sorted(item for part in parts for item in part.items())]
    curves = [torch.stack(list(points)) for points in zip(*found, strict=True)]  # [contexts, points, 2] each
    names = ["EAGLE-2", *(path.stem for path in arguments.classifiers)]
    for name, curve, settings in zip(names, curves, [SIZES, *[CONFIDENCES] * (len(curves) - 1)], strict=True):
        rows = [
            [f"{setting:g}", in_words(tokens.tolist()), in_words(nodes.tolist(), 1)]
            for setting, (tokens, nodes) in zip(settings, curve.permute(1, 2, 0), strict=True)
        ]
        print("\n".join(["", *markdown([[name, "tokens a pass", "nodes"], *rows])]))

    print("\n".join(["", *compared(names, curves)]))
    means = {name: curve.mean(0).tolist() for name, curve in zip(names, curves, strict=True)}
    print(json.dumps({"contexts": len(found), "curves": means}))


if __name__ == "__main__":
    main()
