"""Would trees of a mixture gain if a candidate's price had the experts that it adds to the pass?

    python -m scripts.make.inflate_experts moe
    python -m scripts.papers.expert_price moe

Large trees of a text are verified, and which experts each node asked for is noted, with the path that was accepted. Of
each tree two smaller ones are taken afterwards: the nodes whose predicted acceptance is above a threshold, as edgespec
chooses them; and the nodes whose predicted acceptance is above the price of themselves and of the experts that they
add to those that the tree has, best first. The latter are known here and could at best be guessed, so that no price of
experts in growth gains more. A pass takes as long as its dense part and its distinct experts, and a row as long as a
tenth of an expert; the dense part is as long as several numbers of experts.

Prints, for each of these, the tokens a second of both over plain decoding's, at the threshold and at the prices that
are best for all trees together.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import edgespec.decode.batch as batch_module
from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.decode.accept import AcceptedTree, Failed
from edgespec.decode.batch import Batch
from edgespec.decode.sequence import Sequence
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.tree.token_tree import TokenTree
from scripts.bench.expert_passes import choices_in, routers_of
from scripts.situations import SEED, read_texts, write_prompts

DENSE_IN_EXPERTS = (0, 8, 32, 128, 512)  # the seconds of a pass's dense part over those of an expert
ROW_IN_EXPERTS = 0.1
PRICES = tuple(0.001 * 1.5**step for step in range(18))  # tokens that a node has to yield, or one expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A large tree, what its nodes asked for, and the nodes that were accepted."""

    scores: list[float]  # of each node: its predicted acceptance; the root's is the largest
    parents: list[int]
    asked: Tensor  # [nodes, layers * experts] bool
    path: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a smaller tree asked for and yielded."""

    tokens: int
    nodes: int
    experts: int


class Recording:
    """Notes each tree that is verified, with its routers' choices."""

    def __init__(self, model: nn.Module, num_experts: int) -> None:
        self.trees: list[Verified] = []
        self._chosen: dict[nn.Module, list[Tensor]] = {}
        self._num_experts = num_experts
        for router in routers_of(model):
            router.register_forward_hook(self._hear)

    def _hear(self, router: nn.Module, _given: Any, output: Any) -> None:
        experts = choices_in(output)
        assert experts is not None
        self._chosen.setdefault(router, []).append(experts.reshape(-1, experts.shape[-1]))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within this block, verified trees are noted."""
        grow, commit = Batch._grow, batch_module.commit

        def begin(batch: Batch) -> list[tuple[Sequence, TokenTree]]:
            self._chosen.clear()
            return grow(batch)

        def end(accepted: abc.Sequence[AcceptedTree]) -> tuple[list[AcceptedTree], list[Failed]]:
            for _, tree, found in accepted:
                self._note(tree, found.path)
            return commit(accepted)

        Batch._grow, batch_module.commit = begin, end  # type: ignore[method-assign]
        try:
            yield
        finally:
            Batch._grow, batch_module.commit = grow, commit  # type: ignore[method-assign]

    def _note(self, tree: TokenTree, path: tuple[int, ...]) -> None:
        if tree.scores is None:  # plain, at the text's end
            return
        asked = []
        for parts in self._chosen.values():
            indices = torch.cat(parts)
            assert len(indices) == tree.num_nodes, "rows of other texts are among them"
            asked.append(
                torch.zeros(tree.num_nodes, self._num_experts, dtype=torch.bool).scatter_(1, indices, value=True)
            )
        self.trees.append(
            Verified(scores=tree.scores.tolist(), parents=tree.parents.tolist(), asked=torch.cat(asked, 1),
                     path=frozenset(path))
        )  # fmt: skip


def by_threshold(tree: Verified, price: float) -> Taken:
    """The nodes that are worth more than the price, whatever they ask for."""
    return _taken(tree, [node for node, score in enumerate(tree.scores) if node == 0 or score > price])


def by_experts(tree: Verified, price: float) -> Taken:
    """The nodes that are worth more than the experts that they add, each at the price, and than a row."""
    nodes, asked = [0], tree.asked[0].clone()
    open_nodes = {node for node, parent in enumerate(tree.parents) if parent == 0}
    while open_nodes:
        added = {node: int((tree.asked[node] & ~asked).sum()) for node in open_nodes}
        worth = {node: tree.scores[node] / (price * (added[node] + ROW_IN_EXPERTS)) for node in open_nodes}
        best = max(open_nodes, key=lambda node: worth[node])
        if worth[best] <= 1.0:
            break
        nodes.append(best)
        asked |= tree.asked[best]
        open_nodes.remove(best)
        open_nodes |= {node for node, parent in enumerate(tree.parents) if parent == best}
    return _taken(tree, nodes)


def _taken(tree: Verified, nodes: list[int]) -> Taken:
    accepted = sum(node in tree.path for node in nodes[1:])  # parents are taken with their children
    return Taken(tokens=1 + accepted, nodes=len(nodes), experts=int(tree.asked[nodes].any(0).sum()))


def best_rate(found: list[list[Taken]], dense: float) -> tuple[float, float, float]:
    """Tokens a unit of time at the best of several prices; with the nodes and the tokens of a tree there."""

    def rate(trees: list[Taken]) -> float:
        seconds = sum(dense + tree.experts + ROW_IN_EXPERTS * tree.nodes for tree in trees)
        return sum(tree.tokens for tree in trees) / seconds

    best = max(found, key=rate)
    return rate(best), sum(tree.nodes for tree in best) / len(best), sum(tree.tokens for tree in best) / len(best)


def main() -> None:
    """Verify trees, then take smaller ones of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a mixture of scripts.make.inflate_experts")
    parser.add_argument("--tree-size", type=int, default=64, help="nodes of the large trees")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = read_texts(write_prompts(Path(folder), arguments.num_prompts))
    tree = TreeSettings(size=arguments.tree_size)
    with Engine.from_pretrained(arguments.model, draft=DEMO_FOLDER / "draft", tree=tree, self_check=False) as engine:
        model = engine.target_model.model
        recording = Recording(model, model.config.num_local_experts)
        with recording.noted():
            for number, text in enumerate(texts):
                engine.generate(text, max_new_tokens=arguments.new_tokens, seed=SEED + number,
                                sampling=SamplingSettings(temperature=arguments.temperature))  # fmt: skip
    choices: dict[str, Callable[[Verified, float], Taken]] = {"acceptance": by_threshold, "experts": by_experts}
    found = {name: [[choice(tree, price) for tree in recording.trees] for price in PRICES]
             for name, choice in choices.items()}  # fmt: skip
    plain = [[by_threshold(tree, 2.0) for tree in recording.trees]]
    print(f"{len(recording.trees)} trees of up to {arguments.tree_size} nodes")
    print("dense part   by acceptance alone      by acceptance and experts   gain")
    for dense in DENSE_IN_EXPERTS:
        base = best_rate(plain, dense)[0]
        rows = {name: best_rate(trees, dense) for name, trees in found.items()}
        words = [f"{rate / base:5.2f} ({nodes:4.1f} nodes, {tokens:.2f})" for rate, nodes, tokens in rows.values()]
        print(f"{dense:10}   {words[0]}   {words[1]}   {rows['experts'][0] / rows['acceptance'][0]:.2f}")


if __name__ == "__main__":
    main()
