"""A simulated machine and pair: steps whose costs and acceptance are known, for choices of trees."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.step import PassCost, StepResult
from edgespec.tuning.tree_choice import TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from profiles.experts import Routing

WIDTH = 4
MAX_DEPTH = 24
FIRST = (0.45, 0.95)
STEP_NUMBERS = itertools.count()  # of all steps, as an engine counts them


@dataclass(slots=True, kw_only=True)
class Machine:
    """What a step takes; `slowness` is by the step's number."""

    pass_s: Callable[[int], float]  # of rows
    tree_s: float = 0.0
    layer_s: float = 0.0
    node_s: float = 0.0
    slowness: Callable[[int], float] = field(default=lambda _step: 1.0)
    noise: float = 0.05

    def growth_s(self, layers: int, nodes: int) -> float:
        return self.tree_s + self.layer_s * layers + self.node_s * nodes


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was taken."""

    tokens: int
    seconds: float
    nodes: int


class Pair:
    """Trees whose first children are accepted with a chance that differs by step, 0.7 on average unless told."""

    def __init__(self, *, first: tuple[float, float] = FIRST, kept: float = 1.0, seed: int = 7) -> None:
        """`kept` is how much of a promised chance is there."""
        self.first, self.kept, self.random = first, kept, random.Random(seed)

    def grown(self, limits: TreeLimits) -> tuple[TokenTree, list[int], list[int], list[float], float]:
        """A tree by its limits; with parents, layers and scores of its nodes, and this step's confidence."""
        confidence = self.random.uniform(*self.first)
        chances = [confidence, *((1 - confidence) * share for share in (0.4, 0.2, 0.1))]
        heap, order = [(-chance, 0, rank, 1) for rank, chance in enumerate(chances)], []
        numbers, nodes = {0: 0}, []
        heapq.heapify(heap)
        while heap and len(nodes) < limits.size and -heap[0][0] >= limits.threshold:
            negative, parent, rank, layer = heapq.heappop(heap)
            nodes.append((layer, parent, rank, -negative))
            own = len(nodes)
            if layer < MAX_DEPTH:
                for below, chance in enumerate(chances):
                    heapq.heappush(heap, (negative * chance, own, below, layer + 1))
        layers_of = [layer for layer, *_ in nodes]
        sums = [0.0] * MAX_DEPTH
        for layer, _, _, score in nodes:
            sums[layer - 1] += score
        deepest = next((at for at, total in enumerate(sums, 1) if total < limits.stop_gain), MAX_DEPTH)
        order = sorted((n for n in range(len(nodes)) if layers_of[n] <= deepest), key=layers_of.__getitem__)
        parents, ranks, layers, scores = [-1], [0], [0], [float("inf")]
        for number, node in enumerate(order, start=1):
            layer, parent, rank, score = nodes[node]
            numbers[node + 1] = number
            parents.append(numbers[parent])
            ranks.append(rank)
            layers.append(layer)
            scores.append(score)
        tree = TokenTree(
            tokens=torch.zeros(len(parents), dtype=torch.long), parents=torch.tensor(parents),
            ranks=torch.tensor(ranks), draw="chosen", draft_rows=torch.full((len(parents),), -1),
            draft_probs=torch.empty(0, 1), scores=torch.tensor(scores, dtype=torch.float64),
        )  # fmt: skip
        return tree, parents, layers, scores, confidence

    def accepted(self, parents: Sequence[int], ranks: Sequence[int], confidence: float) -> tuple[int, ...]:
        """The path that the target takes."""
        chances = [confidence, *((1 - confidence) * share for share in (0.4, 0.2, 0.1))]
        path, node = [], 0
        while True:
            luck, found = self.random.random(), None
            for child in (n for n in range(node + 1, len(parents)) if parents[n] == node):
                luck -= self.kept * chances[ranks[child]]
                if luck < 0:
                    found = child
                    break
            if found is None:
                return tuple(path)
            path.append(found)
            node = found


def simulate(choice: TreeChoice, machine: Machine, pair: Pair, *, steps: int, first: int = 0) -> list[Done]:
    """Take steps by a choice."""
    found = []
    for number in range(first, first + steps):
        choice.begin_step(next(STEP_NUMBERS), 1)
        limits = choice.in_step
        nodes, num_layers, growth_s, path, grown = 0, 0, 0.0, (), None
        if limits is not None:
            tree, parents, layers, _, confidence = pair.grown(limits)
            nodes, num_layers = len(parents) - 1, max(layers)
            growth_s = machine.growth_s(max(1, num_layers), nodes)
            path = pair.accepted(parents, tree.ranks.tolist(), confidence)
            grown = choice.expect(tree, limits, MAX_DEPTH + 1)
        slow = machine.slowness(number) * pair.random.uniform(1 - machine.noise, 1 + machine.noise)
        seconds = {"grow_s": growth_s * slow, "target_s": machine.pass_s(1 + nodes) * slow, "rest_s": 0.0}
        step = StepResult(
            tokens=(0,) * (1 + len(path)), path=path, finish=None, num_drafted=nodes, is_prefill=False, **seconds
        )
        choice.observe(
            PassCost(
                num_texts=1,
                num_rows=1 + nodes,
                num_prompt_rows=0,
                num_layers=num_layers,
                num_drafted=nodes,
                num_unread=0,
                **seconds,
            )
        )
        choice.learn(step, grown)
        found.append(Done(len(step.tokens), step.total_s, nodes))
    return found


def tokens_per_s(steps: Sequence[Done]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def mixture(*, dense_s: float, all_experts_s: float, kept: float, layer_s: float, routing: Routing) -> Machine:
    """A machine that keeps a share of a mixture's experts, and moves the others that rows ask for."""
    num_experts = routing.num_experts

    def pass_s(rows: int) -> float:
        return dense_s + all_experts_s * routing.fetched(rows, kept=kept * num_experts) / num_experts

    return Machine(pass_s=pass_s, layer_s=layer_s)


def best_fixed(machine: Machine, *, first: tuple[float, float] = FIRST) -> float:
    """The speed of the fastest of fixed limits, and of plain decoding."""
    speeds = [1 / machine.pass_s(1)]
    for limits in itertools.starmap(TreeLimits, itertools.product((4, 16, 64, 128), (0.0, 0.1), (0.0, 0.6))):
        steps = fixed_steps(limits, first)
        seconds = (machine.growth_s(max(1, layers), nodes) + machine.pass_s(1 + nodes) for _, nodes, layers in steps)
        speeds.append(sum(tokens for tokens, _, _ in steps) / sum(seconds))
    return max(speeds)


@functools.cache
def fixed_steps(limits: TreeLimits, first: tuple[float, float]) -> list[tuple[int, int, int]]:
    """Tokens, nodes and layers of steps with fixed limits, which no machine changes."""
    pair, found = Pair(first=first), []
    for _ in range(150):
        tree, parents, layers, _, confidence = pair.grown(limits)
        path = pair.accepted(parents, tree.ranks.tolist(), confidence)
        found.append((1 + len(path), len(parents) - 1, max(layers)))
    return found
