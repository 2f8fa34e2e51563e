"""The seconds of a step's verbs, beside the counts that they are seconds of."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from edgespec.tree.token_tree import TokenTree, depths
from edgespec.tuning.step import PassCost

Verb = Literal["grow", "read", "accept", "decide", "commit"]


class StepClock:
    """Notes the seconds of each verb of a step."""

    def __init__(self, num_unread: int = 0) -> None:
        """Begin a step in whose growth the draft reads this number of tokens from before the last one."""
        self._num_unread = num_unread
        self._seconds: dict[Verb, float] = {}

    @contextmanager
    def verb(self, verb: Verb) -> Iterator[None]:
        """Note the seconds of this block."""
        started = time.perf_counter()
        yield
        self._seconds[verb] = time.perf_counter() - started

    def cost(self, trees: Sequence[TokenTree], *, drafted: Sequence[TokenTree], num_prompt_rows: int = 0) -> PassCost:
        """Return the seconds of the step, whose pass read these trees and this number of prompts' rows.

        A draft had its part in those that are `drafted`.
        """
        return PassCost(
            num_texts=len(trees),
            num_rows=sum(tree.num_nodes for tree in trees),
            num_prompt_rows=num_prompt_rows,
            num_layers=max((_num_layers(tree) for tree in drafted), default=None),
            num_drafted=sum(_num_drafted(tree) for tree in drafted),
            num_unread=self._num_unread,
            grow_s=self._seconds["grow"],
            target_s=self._seconds["read"],
            rest_s=self._seconds["accept"] + self._seconds["commit"],
            decide_s=self._seconds.get("decide", 0.0),
        )


def _num_layers(tree: TokenTree) -> int:
    """Return the layers of the nodes that the draft grew."""
    layers = depths(tree.parents)
    if tree.looked_up is None:
        return int(layers[-1])
    return max(int(layer) for layer, is_other in zip(layers.tolist(), tree.looked_up, strict=True) if not is_other)


def _num_drafted(tree: TokenTree) -> int:
    return tree.num_nodes - 1 - sum(tree.looked_up or ())
