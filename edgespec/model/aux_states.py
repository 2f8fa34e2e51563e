"""Features of a target's rows that a draft reads: hidden states between layers, taken while the layers stream by.

Legend: n rows of a pass, h the target's hidden size, w the features' width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 512  # that are made features at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuxStates:
    """Where features are taken, and what becomes of them before they are kept."""

    layers: tuple[int, ...]  # numbers of layers that the residual stream has passed: 0 is the embedding's output
    make: Callable[[Tensor], Tensor]  # the states side by side [n, len(layers) * h] -> features [n, w]

    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """Return the features [n, w] of a pass's rows, whose states [n, h] are known by their layers."""
        num_rows = states[self.layers[0]].shape[0]
        made = [
            self.make(torch.cat([states[layer][first : first + ROWS] for layer in self.layers], -1))
            for first in range(0, num_rows, ROWS)
        ]
        return made[0] if len(made) == 1 else torch.cat(made)
