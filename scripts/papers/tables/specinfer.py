"""SpecInfer: trees of several drafts merged into one, and branching factors that are learned.

All at temperature 0, where any tree is lossless. A merged tree has as many nodes as the tree of one draft that it is
compared with: each draft gives its best nodes, and what both have counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch

from edgespec.config import SamplingSettings
from edgespec.draft.feature_head import open_drafter
from edgespec.grow.acceptance import default_acceptance
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from scripts.papers.tables.boosted_draft import boosted_draft
from scripts.papers.tables.paper_table import Context, PaperTable
from scripts.papers.tables.speeds import lengths_and_layers, show_gain, show_speeds

GREEDY = SamplingSettings()
SIZES = (16, 64)
LONGEST_MATCH, LOOKED_UP = 8, 12  # tokens that are looked for in the text, and that are taken behind them
PAPERS, LIBRARYS = (1, 1, 3, 1, 1, 1, 1, 1), (4, 2, 2, 1)  # branchings: SpecInfer's own, and mcsd's here
DEPTH = 24

Path: TypeAlias = tuple[int, ...]  # a node as the tokens from the root's child down to it
Branching: TypeAlias = tuple[int, ...]


def nodes_of(tree: TokenTree) -> list[Path]:
    """The nodes below the root, best first: parents come before their children."""
    assert tree.scores is not None
    paths: list[Path] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return [paths[node] for node in tree.scores.argsort(descending=True, stable=True).tolist() if node > 0]


def merged(first: Sequence[Path], second: Sequence[Path], *, size: int, share: int) -> tuple[set[Path], set[Path]]:
    """The best nodes of both that are `size` together, at most `share` of them the second's best: what each gives."""
    given = list(second[:share])
    taken: list[Path] = []
    for node in first:
        if len({*taken, *given}) >= size and node not in given:
            break
        taken.append(node)
    return set(taken), set(given)


def looked_up(ids: Sequence[int]) -> list[Path]:
    """What followed the longest end of the text where it was before, the last time: a chain, or nothing."""
    for length in range(LONGEST_MATCH, 1, -1):
        end = tuple(ids[-length:])
        for start in range(len(ids) - length - 1, -1, -1):
            if tuple(ids[start : start + length]) == end:
                found = tuple(ids[start + length : start + length + LOOKED_UP])
                return list(accumulate(((token,) for token in found), lambda path, token: path + token))
    return []


def num_accepted(context: Context, nodes: set[Path]) -> int:
    """How many of the nodes the target's own text goes through."""
    ordered = sorted(nodes, key=len)
    number = {(): 0} | {path: place for place, path in enumerate(ordered, start=1)}
    tree = TokenTree(
        tokens=torch.tensor([context.bench.root, *(path[-1] for path in ordered)]),
        parents=torch.tensor([-1, *(number[path[:-1]] for path in ordered)]),
        ranks=torch.zeros(len(number), dtype=torch.long),
        draw="chosen",
        draft_rows=torch.full((len(number),), -1),
    )
    return context.num_accepted(tree, GREEDY)


def trees_of(size: int) -> dict[str, Callable[[list[Path], list[Path], list[Path]], tuple[set[Path], set[Path]]]]:
    """Trees of `size` nodes: what the draft and the second one give of their own and of what is looked up."""
    return {
        f"{size} of the draft's": lambda own, _second, _text: (set(own[:size]), set()),
        f"{size} of the second draft's": lambda _own, second, _text: (set(), set(second[:size])),
        f"{size} of both, a quarter the second's": lambda own, second, _text: merged(
            own, second, size=size, share=size // 4
        ),
        f"{size} of both, half the second's": lambda own, second, _text: merged(
            own, second, size=size, share=size // 2
        ),
        f"{size} of the draft's and the text's": lambda own, _second, text: merged(
            own, text, size=size, share=size // 2
        ),
    }


TREES = {name: make for size in SIZES for name, make in trees_of(size).items()}


def merged_lengths(context: Context) -> list[tuple[float, float, float]]:
    """Of every tree: the tokens of a pass, the layers of both drafts, and those of the deeper one."""
    settings = TreeSettings(policy="opt-tree", draw="chosen", size=max(SIZES), depth=DEPTH)
    bench = context.bench
    own = nodes_of(context.grow(settings, GREEDY))
    drafter = open_drafter(boosted_draft(bench.engine), bench.target, sampling=settings.draft_sampling(GREEDY))
    drafter.begin(bench.ids[:-1])
    second = nodes_of(bench.grow(settings, GREEDY, drafter, context.number, 0, torch.Generator()))
    text = looked_up(bench.ids)
    found = []
    for name, make in TREES.items():
        parts = make(own, second, text)
        # What is looked up takes no call of a draft.
        layers = [max(map(len, part), default=0) for part in (parts[:1] if "text" in name else parts)]
        found.append((1.0 + num_accepted(context, parts[0] | parts[1]), float(sum(layers)), float(max(layers))))
    return found


def show_merged(found: Sequence[list[tuple[float, float, float]]]) -> list[str]:
    """Speeds where drafts take their turns, then where they work side by side, and what merging gains."""
    in_turn = [[(tokens, layers) for tokens, layers, _ in trees] for trees in found]
    beside = [[(tokens, layers) for tokens, _, layers in trees] for trees in found]
    kinds = len(TREES) // len(SIZES)
    lines = [*show_speeds("drafts in turn", list(TREES), in_turn), ""]
    lines += [*show_speeds("drafts side by side", list(TREES), beside), ""]
    for place, size in enumerate(SIZES):
        alone, mixed = [kinds * place, kinds * place + 1], [kinds * place + 2, kinds * place + 3]
        with_text = [kinds * place + 4]
        lines += [
            show_gain(f"{size} nodes, both drafts in turn over the better one", mixed, alone, in_turn),
            show_gain(f"{size} nodes, both drafts side by side over the better one", mixed, alone, beside),
            show_gain(f"{size} nodes, the draft's and the text's over the draft's", with_text, alone[:1], in_turn),
        ]
    return lines


def learned_branching(acceptance: Sequence[float], size: int) -> Branching:
    """The branching of at most `size` nodes that promises most tokens by acceptance by rank."""
    reached = list(accumulate(acceptance))  # the chance that one of the k + 1 best children is accepted

    @functools.cache
    def best(width: int, left: int) -> tuple[float, Branching]:
        found: tuple[float, Branching] = (0.0, ())
        for count, chance in enumerate(reached[: left // width], start=1):
            below, factors = best(width * count, left - width * count)
            found = max(found, (chance * (1 + below), (count, *factors)))
        return found

    return best(1, size)[1]


def num_nodes(branching: Branching) -> int:
    """The nodes below the root."""
    return sum(accumulate(branching, lambda above, count: above * count))


def branchings() -> dict[str, TreeSettings]:
    """The fixed branchings, and trees of as many nodes: a learned one, Sequoia's, and OPT-Tree's."""
    acceptance = default_acceptance().rank_acceptance(GREEDY.temperature, "chosen")
    found = {}
    for fixed in (PAPERS, LIBRARYS):
        size = num_nodes(fixed)
        learned = learned_branching(tuple(acceptance), size)
        for kind, branching in (("fixed", fixed), ("learned", learned)):
            name = f"{num_nodes(branching)}, {kind} {' x '.join(map(str, branching))}"
            found[name] = TreeSettings(policy="specinfer", draw="chosen", branching=branching)
        found[f"{size}, Sequoia"] = TreeSettings(policy="sequoia", draw="chosen", size=size, depth=DEPTH)
        found[f"{size}, OPT-Tree"] = TreeSettings(policy="opt-tree", draw="chosen", size=size, depth=DEPTH)
    return found


def show_branchings(found: Sequence[list[tuple[float, float]]]) -> list[str]:
    """Speeds, and what learning the branching gains over the fixed one."""
    return [
        *show_speeds("nodes and tree", list(branchings()), found),
        "",
        show_gain("Learned over SpecInfer's own", [1], [0], found),
        show_gain("Learned over 4 x 2 x 2 x 1", [5], [4], found),
    ]


TABLES = (
    PaperTable(
        name="specinfer-merge",
        source="SpecInfer, section 3, merge-based speculation",
        claim="trees of several drafts, each tuned where those before it fail, are merged into one",
        visit=merged_lengths,
        show=show_merged,
    ),
    PaperTable(
        name="specinfer-branching",
        source="SpecInfer, section 3, expansion-based speculation",
        claim="trees have a fixed number of children by layer; which numbers are best is left open",
        visit=lambda context: lengths_and_layers(context, list(branchings().values()), GREEDY),
        show=show_branchings,
    ),
)
