"""DySpec: acceptance against draft probability, sizes of trees of a threshold, and blocks of the attention mask."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.train.records import node_values
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import ancestors_mask
from scripts.papers.tables.paper_table import Context, PaperTable, bin_names, in_bins, in_words, markdown, shares
from tests.support.node_order import depth_first_order, num_blocks, reordered

SAMPLING = SamplingSettings(temperature=0.6)
NEARLY = 0.1  # of an acceptance that is nearly never, or nearly always
SIZES = (64, 256, 768)
PREFIXES = (0, 128, 1024)
BLOCK = 32
LARGEST = 768  # of the trees of figure 5
THRESHOLDS = (0.1, 0.03, 0.01, 0.003, 0.001)
BINNED, SIZE_BINS = 0.01, (0, 160, 200, 240, 280, LARGEST)  # a threshold whose trees do not reach the largest size


def acceptance_by_probability(context: Context) -> Tensor:
    """Of what the draft would draw below every node that it expanded: sums [3, bins, 2] by q.

    The chance min(1, p/q) that a drawn token is accepted, whether it is nearly 0 or 1, and its p.
    """
    tree = context.grow(TreeSettings(policy="dyspec", size=64), SAMPLING)
    p = context.bench.target_probs(tree, SAMPLING)
    assert tree.draft_probs is not None
    expanded = tree.draft_rows >= 0
    p, q = p[expanded].flatten(), tree.draft_probs[tree.draft_rows[expanded]].flatten()
    p, q = p[q > 0], q[q > 0]
    acceptance = (p / q).clamp(max=1.0)
    is_sure = (acceptance < NEARLY) | (acceptance > 1 - NEARLY)
    return torch.stack([in_bins(q, what.double(), q) for what in (acceptance, is_sure, p)])


def show_acceptance(found: Sequence[Tensor]) -> list[str]:
    """A row a bin of q."""
    columns = [shares([sums[number] for sums in found]) for number in range(3)]
    heading = ["q", "min(1, p/q)", f"below {NEARLY} or above {1 - NEARLY}", "p"]
    return markdown([heading, *zip(bin_names(), *columns, strict=True)])


def values_of_slots(context: Context) -> Tensor:
    """The slots of the largest tree, best first: their scores, and the chances that they are accepted: [nodes, 2].

    Trees of a threshold, or of fewer nodes, are the first ones of them.
    """
    tree = context.grow(TreeSettings(policy="dyspec", size=LARGEST), SAMPLING)
    assert tree.scores is not None
    values = node_values(tree, context.bench.target_probs(tree, SAMPLING)).double()
    both = torch.stack([tree.scores.double(), values], -1)[1:]  # without the root
    return both[both[:, 0].argsort(descending=True, stable=True)]


def show_thresholds(found: Sequence[Tensor]) -> list[str]:
    """A row a threshold, beside trees of one size for all contexts; then trees of one threshold, by size."""
    table = [["threshold", "nodes", "smallest", "largest", "tokens a pass", "of one size for all"]]
    for threshold in THRESHOLDS:
        sizes = [int((slots[:, 0] >= threshold).sum()) for slots in found]
        mean = round(sum(sizes) / len(sizes))
        tokens, same = (
            [1.0 + float(slots[:size, 1].sum()) for size, slots in zip(each, found, strict=True)]
            for each in (sizes, [mean] * len(found))
        )
        table.append([f"{threshold:g}", in_words(list(map(float, sizes)), 1), str(min(sizes)), str(max(sizes)),
                      in_words(tokens), f"{in_words(same)} of {mean}"])  # fmt: skip
    return [*markdown(table), "", *_show_sizes(found)]


def _show_sizes(found: Sequence[Tensor]) -> list[str]:
    kept = [slots[slots[:, 0] >= BINNED, 1] for slots in found]
    table = [[f"nodes of a tree of threshold {BINNED:g}", "trees", "tokens a pass"]]
    for least, most in pairwise(SIZE_BINS):
        tokens = [1.0 + float(values.sum()) for values in kept if least < len(values) <= most]
        words = in_words(tokens) if len(tokens) > 1 else "-"
        table.append([f"{least + 1} to {most}", str(len(tokens)), words])
    return markdown(table)


def blocks_of_masks(context: Context) -> list[float]:
    """Blocks of tree masks that are not empty, as grown and depth first: two for each size and prefix."""
    found: list[float] = []
    for size in SIZES:
        tree = context.grow(TreeSettings(policy="dyspec", size=size), SAMPLING)
        ordered = reordered(tree, depth_first_order(tree.parents))
        for prefix in PREFIXES:
            found += [
                float(num_blocks(ancestors_mask(one.parents), block=BLOCK, num_before=prefix))
                for one in (tree, ordered)
            ]
    return found


def show_blocks(found: Sequence[list[float]]) -> list[str]:
    """A row a size and a prefix."""
    columns = list(zip(*found, strict=True))
    table = [["nodes", "prefix", "as grown", "depth first", "share"]]
    for number, (size, prefix) in enumerate((size, prefix) for size in SIZES for prefix in PREFIXES):
        grown, ordered = columns[2 * number], columns[2 * number + 1]
        share = [after / before for before, after in zip(grown, ordered, strict=True)]
        table.append([str(size), str(prefix), in_words(grown, 1), in_words(ordered, 1), in_words(share)])
    return markdown(table)


TABLES = (
    PaperTable(
        name="dyspec-2",
        source="DySpec, figure 2",
        claim="tokens of higher draft probability have a higher acceptance rate and target probability; for a given "
        "draft probability the acceptance rate is mostly near 0 or near 1",
        visit=acceptance_by_probability,
        show=show_acceptance,
    ),
    PaperTable(
        name="dyspec-5",
        source="DySpec, figure 5",
        claim="with a threshold of 0.001 trees of at most 768 nodes have 551.79 on average (temperature 0.6)",
        visit=values_of_slots,
        show=show_thresholds,
    ),
    PaperTable(
        name="dyspec-9",
        source="DySpec, figure 9",
        claim="depth-first order leaves 218 of 366 blocks of a tree of 768 nodes",
        visit=blocks_of_masks,
        show=show_blocks,
    ),
)
