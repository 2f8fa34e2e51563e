"""C2T: chains that end early, EAGLE-1's and EAGLE-2's trees beside its own, its second pruning, and its entropy.

The classifier is the bench's; scripts.papers.compare_c2t compares classifiers. All at temperature 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.grow.beam import Beam
from edgespec.grow.c2t import c2t_rule
from edgespec.grow.growing import Layer
from edgespec.grow.static import grow_static, static_shape
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling.distribution import ENTROPY_TOKENS, entropy_of_top
from edgespec.sampling.noise import TextNoise
from edgespec.tree.settings import TreeSettings
from edgespec.tree.shapes import chain
from edgespec.tree.token_tree import TokenTree
from scripts.papers.compare_c2t import DEPTH, EAGLE2, WIDTH, nodes_at
from scripts.papers.compare_policies import CPU
from scripts.papers.tables.paper_table import Context, PaperTable, in_words, markdown, resampled, with_interval

GREEDY = SamplingSettings()
MAX_NODES = 768
UNBOUNDED = 4096  # nodes of trees that only their confidence ends
LONGEST = 16  # tokens of a chain that may end early
LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9)  # of chains that do not
RULES = ("DyMax", "DyJoint", "C2T")
CONFIDENCES = (*(step / 50 for step in range(1, 50)), 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)  # ends chains below
BETAS, WIDTHS = (0.3, 0.5), (15, 20, 25, 30, None)
ENTROPY_COUNTS = (10, 100, 500, 1000, 2048)
SIZES = {
    "EAGLE-1": TreeSettings(policy="static", tree_file=Path("eagle-1"), draw="chosen"),
    **{f"EAGLE-2, {size} nodes": replace(EAGLE2, size=size, max_children=10) for size in (25, 60)},
    **{
        f"C2T, {beta:g}": TreeSettings(policy="c2t", size=MAX_NODES, depth=DEPTH, max_children=WIDTH, confidence=beta)
        for beta in (0.85, 0.65)
    },
}


def chain_points(context: Context) -> Tensor:
    """The tokens of a pass and the nodes [rules, points, 2] of chains: of each length, then by rule and confidence.

    One chain of the greatest length is all of them. A token that falls short is kept, and nothing follows it. The
    fixed chains have the last number again for the confidences that they have no use for.
    """
    scores: list[Tensor] = []  # [rules], one entry a layer but the last

    def listen(layer: Layer) -> Tensor:
        joint = layer.path_probability[:, None] * layer.q_drawn
        confidence = context.bench.classifier.confidence(
            path_probability=joint, entropy=entropy_of_top(layer.q), depth=layer.depth
        )
        scores.append(torch.cat([layer.q_drawn, joint, confidence])[:, 0])
        return torch.zeros(1, dtype=torch.bool)

    noise = TextNoise(seed=0, key=0, vocab=context.bench.target.vocab, device=CPU)  # greedy children have none
    growth = grow_static(
        context.bench.root, shape=static_shape(chain(LONGEST), CPU), depth=LONGEST, draw="chosen", stops=listen,
        draws=TextDraws(sampling=GREEDY, device=CPU, generator=torch.Generator(), noise=noise),
    )  # fmt: skip
    tree = context.grow_otherwise(growth, EAGLE2, GREEDY)
    accepted = context.num_accepted(tree, GREEDY)
    fixed = torch.tensor([*LENGTHS, *[LENGTHS[-1]] * (len(CONFIDENCES) - len(LENGTHS))])
    nodes = torch.stack([fixed, *ends(torch.stack(scores, 1))])
    return torch.stack([1 + nodes.clamp(max=accepted), nodes], -1).double()


def ends(scores: Tensor) -> Tensor:
    """The lengths [rules, confidences] of chains whose tokens have scores [rules, layers]; the last has no score."""
    goes_on = scores[:, None] >= torch.tensor(CONFIDENCES, dtype=scores.dtype)[:, None]  # [rules, confidences, layers]
    return 1 + goes_on.long().cumprod(-1).sum(-1)


def show_chains(found: Sequence[Tensor]) -> list[str]:
    """A row a length of fixed chains: how many nodes the others need to accept as much."""
    every = torch.stack(list(found))  # [contexts, rules, points, 2]
    curves = torch.cat([every.mean(0)[None], resampled(every)])  # [1 + bootstraps, rules, points, 2]
    lengths = curves[:, 0, : len(LENGTHS), 0].tolist()
    nodes = torch.stack([nodes_at(*pair) for pair in zip(lengths, curves[:, 1:], strict=True)])  # [.., rules, lengths]
    table = [["chains of", "tokens a pass", *(f"{rule}'s nodes" for rule in RULES), "C2T's over DyJoint's"]]
    for place, length in enumerate(LENGTHS):
        of_length = nodes[:, :, place]
        columns = [*of_length.unbind(1), of_length[:, 2] / of_length[:, 1]]
        cells = ["-" if column[0].isnan() else with_interval(column[0], column[1:]) for column in columns]
        table.append([str(length), in_words(every[:, 0, place, 0].tolist()), *cells])
    return markdown(table)


def lengths_and_nodes(context: Context, trees: Sequence[TokenTree]) -> list[tuple[float, float]]:
    """The tokens of a pass with each tree, and its nodes."""
    return [(1.0 + context.num_accepted(tree, GREEDY), tree.num_nodes - 1.0) for tree in trees]


def c2t_tree(context: Context, *, beta: float, width: int | None = WIDTH, count: int = ENTROPY_TOKENS) -> TokenTree:
    """A tree of C2T's that keeps `width` nodes a layer, or all, with the entropy over the `count` likeliest tokens."""
    rule = replace(
        c2t_rule(context.bench.classifier, width=WIDTH),
        layer_nodes=width,
        read=lambda drawn: (entropy_of_top(drawn.q, count),),
    )
    beam = Beam(root=context.bench.root, rule=rule, draw="chosen", size=UNBOUNDED, depth=DEPTH, device=CPU,
                max_children=WIDTH, threshold=beta)  # fmt: skip
    return context.grow_otherwise(beam, EAGLE2, GREEDY)


def show_trees(names: Sequence[str], found: Sequence[list[tuple[float, float]]]) -> list[str]:
    """A row a tree, each with the differences to the row above at the same contexts."""
    columns = list(zip(*found, strict=True))
    table = [["tree", "tokens a pass", "nodes", "more tokens", "more nodes"]]
    for place, (name, pairs) in enumerate(zip(names, columns, strict=True)):
        row = [name, in_words([tokens for tokens, _ in pairs]), in_words([nodes for _, nodes in pairs], 1)]
        for side, digits in ((0, 2), (1, 1)) if place else ():
            above = columns[place - 1]
            more = [pair[side] - other[side] for pair, other in zip(pairs, above, strict=True)]
            row.append(in_words(more, digits))
        table.append([*row, *[""] * (5 - len(row))])
    return markdown(table)


def pruned_twice(context: Context) -> list[tuple[float, float]]:
    """Trees of each confidence and second pruning."""
    return lengths_and_nodes(
        context, [c2t_tree(context, beta=beta, width=width) for beta, width in product(BETAS, WIDTHS)]
    )


TABLES = (
    PaperTable(
        name="c2t-3",
        source="C2T, table 3",
        claim="in chains C2T accepts 2.12 tokens of 116,694 candidates, DyJoint 2.12 of 129,876, DyMax 2.06 of "
        "127,018; chains of 6 accept 2.06 of 125,992, chains of 9 2.13 of 184,140",
        visit=chain_points,
        show=show_chains,
    ),
    PaperTable(
        name="c2t-4",
        source="C2T, table 4",
        claim="EAGLE-1's tree of 26 accepts 2.66 tokens, EAGLE-2's of 26 2.95 and of 60 3.65; C2T accepts 3.06 with "
        "29 % fewer nodes than the one, and 3.66 with 15 % fewer than the other",
        visit=lambda context: lengths_and_nodes(context, [context.grow(tree, GREEDY) for tree in SIZES.values()]),
        show=lambda found: show_trees(list(SIZES), found),
    ),
    PaperTable(
        name="c2t-5",
        source="C2T, table 5",
        claim="a second pruning to 15 to 30 nodes a layer takes tokens and many more nodes at a confidence of 0.3, "
        "hardly any tokens at 0.5",
        visit=pruned_twice,
        show=lambda found: show_trees([f"{beta:g}, {width or 'all'}" for beta, width in product(BETAS, WIDTHS)], found),
    ),
    PaperTable(
        name="c2t-6",
        source="C2T, table 6",
        claim="the entropy over the 1000 likeliest tokens does as well as over all (3.92 accepted); over 100 it does "
        "not (3.70)",
        visit=lambda context: lengths_and_nodes(
            context, [c2t_tree(context, beta=0.5, count=count) for count in ENTROPY_COUNTS]
        ),
        show=lambda found: show_trees([f"{count} tokens" for count in ENTROPY_COUNTS], found),
    ),
)
