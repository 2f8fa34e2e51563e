"""Planted faults of drafts that read the target's features: something stands a position off."""

import pytest
from torch import Tensor

from edgespec.draft.feature_head import FeatureHeadDrafter


def features_early(patch: pytest.MonkeyPatch) -> None:
    """Rows of the text read the feature of a token earlier than they should."""

    def before(self: FeatureHeadDrafter, first: int, end: int) -> Tensor:
        return self._target.features_before(max(0, first - 1), end)[: end - first]

    patch.setattr(FeatureHeadDrafter, "_features_before", before)


def children_late(patch: pytest.MonkeyPatch) -> None:
    """Rows below the root are rotated by one position too much."""
    right = FeatureHeadDrafter.took_in

    def took_in(self: FeatureHeadDrafter, hidden: Tensor) -> Tensor:
        found = right(self, hidden)
        self._positions[0] += self.num_rows == 1
        return found

    patch.setattr(FeatureHeadDrafter, "took_in", took_in)
