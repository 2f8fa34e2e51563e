"""What follows from a tree's settings alone."""

from pathlib import Path

import pytest

from edgespec.config import MIN_TEMPERATURE, DraftSampling, SamplingSettings
from edgespec.tree.settings import COUPLED_DRAFT_TEMPERATURE, COUPLED_TAIL_SHARE, TreeSettings

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
    assert TreeSettings(policy=policy).draft_sampling(greedy) == DraftSampling(temperature=temperature)
    assert TreeSettings(policy=policy, draft_temperature=0.9).draft_sampling(greedy) == DraftSampling(temperature=0.9)


def test_a_greedy_targets_draft_gives_a_chains_classifier_the_probabilities_it_was_fitted_on() -> None:
    chain = TreeSettings(policy="chain", classifier=Path("classifier.json"))
    own = TreeSettings(policy="c2t").draft_sampling(SamplingSettings())
    assert chain.draft_sampling(SamplingSettings()) == own
    assert chain.draft_sampling(TRUNCATED) == TreeSettings(policy="chain").draft_sampling(TRUNCATED)


@pytest.mark.parametrize("tree", [TreeSettings(policy="dyspec"), TreeSettings(policy="opt-tree", draw="chosen")])
def test_above_0_the_draft_of_a_published_rule_is_sampled_as_the_target_is(tree: TreeSettings) -> None:
    assert tree.draft_sampling(TRUNCATED) == DraftSampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1)


@pytest.mark.parametrize("tree", [TreeSettings(), TreeSettings(policy="chain", draw="coupled")])
def test_a_coupled_draft_is_cooler_and_keeps_a_share_of_what_truncation_cuts_off(tree: TreeSettings) -> None:
    """Where any q is lossless, it is the one that has the target's token best."""
    found = tree.draft_sampling(TRUNCATED)
    expected = DraftSampling(
        temperature=COUPLED_DRAFT_TEMPERATURE * 0.7, top_k=20, top_p=0.8, min_p=0.1, tail_share=COUPLED_TAIL_SHARE
    )
    assert found == expected
    assert 0 < COUPLED_DRAFT_TEMPERATURE < 1
    assert 0 < COUPLED_TAIL_SHARE < 0.5


@pytest.mark.parametrize("policy", ["adaptive", "dyspec"])
def test_a_draft_temperature_that_is_given_is_followed(policy: str) -> None:
    for temperature in (0.0, 0.9):
        tree = TreeSettings(policy=policy, draft_temperature=temperature)
        assert tree.draft_sampling(TRUNCATED).temperature == temperature
        assert tree.draft_sampling(SamplingSettings()).temperature == temperature


def test_the_least_temperature_of_a_target_is_one_that_a_draft_can_have() -> None:
    assert TreeSettings().draft_sampling(SamplingSettings(temperature=MIN_TEMPERATURE)).temperature == MIN_TEMPERATURE
