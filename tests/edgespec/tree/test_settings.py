"""What follows from a tree's settings alone."""

from __future__ import annotations

import pytest

from edgespec.config import SamplingSettings
from edgespec.tree.settings import TreeSettings

TRUNCATED = SamplingSettings(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1)


@pytest.mark.parametrize(
    ("policy", "temperature"),
    [
        ("adaptive", 0.6),
        ("dyspec", 0.6),
        ("opt-tree", 0.8),
        ("eagle2", 0.8),
        ("c2t", 0.8),
        ("sequoia", 0.2),
        ("chain", 0.2),
    ],
)
def test_a_greedy_targets_draft_is_not_truncated(policy: str, temperature: float) -> None:
    """Greedy decoding ignores top-k, top-p and min-p: a draft that did not would miss tokens for nothing."""
    greedy = SamplingSettings(temperature=0.0, top_k=20, top_p=0.8, min_p=0.1)
    tree = TreeSettings(policy=policy)
    assert tree.draft_sampling(greedy) == SamplingSettings(temperature=temperature)
    warm = TreeSettings(policy=policy, draft_temperature=0.9)
    assert warm.draft_sampling(greedy) == SamplingSettings(temperature=0.9)


def test_above_0_the_draft_is_truncated_as_the_target_is() -> None:
    assert TreeSettings().draft_sampling(TRUNCATED) == TRUNCATED
    assert TreeSettings(draft_temperature=0.9).draft_sampling(TRUNCATED) == SamplingSettings(
        temperature=0.9, top_k=20, top_p=0.8, min_p=0.1
    )
