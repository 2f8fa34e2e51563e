"""Looked up nodes as rivals of those that the draft grows: a budget that they fill needs no more draft calls.

A rival takes a place among the best nodes until the draft grows the same token below the same parent, which then has
the larger chance of both. The draft is called below such a node only where what its looked up children leave may still
be among the best: along a sure copy it is not.

Legend: t texts, r rivals, k nodes, c candidates of a node, w most rivals below one.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from edgespec.draft.lookup import LookedUp
from edgespec.to_device import on_device


class Rivals:
    """The rivals of a group's texts, and where the draft's nodes stand among them."""

    def __init__(self, of_texts: Sequence[Sequence[LookedUp]], *, like: Tensor) -> None:
        """Begin with what was looked up for each text; scores are a tensor `like` this one."""
        device, num_texts = like.device, len(of_texts)
        self.count = sum(len(found) for found in of_texts)  # r
        every = [one for found in of_texts for one in found]
        self.scores = on_device([one.chance for one in every], device, like.dtype)  # [r]
        self._chances = torch.cat([self.scores, self.scores.new_zeros(1)])
        left = [1.0] * (self.count + 1)
        for first, found in zip(accumulate((len(found) for found in of_texts), initial=0), of_texts, strict=False):
            for one in found:
                if one.parent >= 0:
                    left[first + one.parent] -= one.chance / found[one.parent].chance
        self._left = on_device(left, device, like.dtype)  # [r + 1]
        self.texts = on_device([text for text, found in enumerate(of_texts) for _ in found], device)  # [r]
        # A place is a root, a rival, or no place among them: there nothing is below.
        below: list[list[tuple[int, int]]] = [[] for _ in range(num_texts + self.count + 1)]
        number = 0
        for text, found in enumerate(of_texts):
            first = number
            for one in found:
                below[text if one.parent < 0 else num_texts + first + one.parent].append((one.token, number))
                number += 1
        width = max(len(children) for children in below)
        filled = [children + [(-1, self.count)] * (width - len(children)) for children in below]
        self._tokens = on_device([[token for token, _ in children] for children in filled], device)  # [t + r + 1, w]
        self._numbers = on_device([[number for _, number in children] for children in filled], device)
        self._roots = torch.arange(num_texts, device=device)
        self._expanded = self._roots  # places of the nodes expanded last: [k]

    def among(self, tokens: Tensor) -> Tensor:
        """Return which rivals the candidates [k, c] of the nodes expanded last are; the count stands for none."""
        is_same = self._tokens[self._expanded][:, None] == tokens[:, :, None]  # [k, c, w]
        return torch.where(is_same, self._numbers[self._expanded][:, None], self.count).amin(2)

    def chances(self, numbers: Tensor) -> Tensor:
        """Return the chances of rivals of any shape; that of none is 0."""
        return self._chances[numbers]

    def left(self, numbers: Tensor) -> Tensor:
        """Return the share of a rival's chance that looked up tokens below it leave to others; all of it below none."""
        return self._left[numbers]

    def expand(self, numbers: Tensor) -> None:
        """Note the nodes [k] that are expanded next, as rivals."""
        self._expanded = self._roots.shape[0] + numbers
