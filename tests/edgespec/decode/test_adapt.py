"""Following: what earlier steps decide about the next tree, and that the output stays the target's.

Where distributions are compared, following reacts far more strongly than it does in use, so that a step's
settings really differ; chi-square over the 16 outcomes of two tokens. A right version fails with probability
1e-4 (the seeds are fixed); the planted faults fall below 1e-6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.decode import adapt, choose
from edgespec.decode.adapt import MAX_FACTOR, MAX_SHIFT, Follower, following, make_follower
from edgespec.decode.choose import continue_text, start_session
from edgespec.decode.session import TextSettings
from edgespec.decode.step import StepResult
from edgespec.grow.acceptance import default_acceptance
from edgespec.grow.policies import Grow, OpenPolicy, open_policy
from edgespec.pair.pair import open_pair
from edgespec.profiled import tree_settings, verify_curve
from edgespec.tree.token_tree import TokenTree, root_only
from profiles.schema import Plan, Profile
from scripts.check_lossless import (
    CPU,
    NUM_TOKENS,
    PROMPT_IDS,
    VOCAB,
    Situation,
    law_p_value,
    table_session,
    text_probability,
)
from tests.profiles.examples import example_plan, example_profile

ACCEPTANCE = default_acceptance()
PLAN = example_plan(draw="sampled", threshold=0.05, tokens=3.0)
POLICY = replace(open_policy(tree_settings(PLAN)), acceptance=ACCEPTANCE)


def follower(plan: Plan = PLAN) -> Follower:
    return Follower(plan, verify=verify_curve(example_profile()))


def a_tree(promise: float, nodes: int = 4) -> TokenTree:
    """So many nodes below the root, of so much expected value together."""
    return TokenTree(
        tokens=torch.zeros(nodes + 1, dtype=torch.long),
        parents=torch.tensor([-1, *[0] * nodes]),
        ranks=torch.tensor([0, *range(nodes)]),
        draw="sampled",
        draft_rows=torch.full((nodes + 1,), -1),
        draft_probs=torch.empty(0, VOCAB),
        scores=torch.tensor([torch.inf, *[promise / nodes] * nodes], dtype=torch.float64),
    )


def a_step(tokens: int, drafted: int = 16, *, is_prefill: bool = False) -> StepResult:
    return StepResult(tokens=(0,) * tokens, finish=None, num_drafted=drafted, is_prefill=is_prefill, grow_s=1.0,
                      target_s=1.0, rest_s=1.0)  # fmt: skip


def learned(outcomes: Sequence[tuple[float, int, int]], plan: Plan = PLAN) -> Follower:
    """A follower after steps of a promise, tokens and nodes."""
    found = follower(plan)
    for promise, tokens, drafted in outcomes:
        found.expect(a_tree(promise))
        found.learn(a_step(tokens, drafted))
    return found


OUTCOMES = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 25), st.integers(0, 768)), max_size=40)


@given(OUTCOMES, st.floats(0, 1))
def test_threshold_and_shift_stay_within_bounds(outcomes: list[tuple[float, int, int]], threshold: float) -> None:
    found = learned(outcomes, replace(PLAN, threshold=threshold))
    assert abs(found.shift) <= MAX_SHIFT
    assert threshold / MAX_FACTOR * 0.999 <= found.threshold <= threshold * MAX_FACTOR * 1.001
    TreeSettings(policy="adaptive", threshold=found.threshold)  # which refuses 1


def test_a_long_run_of_luck_or_of_misfortune_reaches_the_bounds() -> None:
    assert learned([(2.0, 25, 16)] * 200).shift == MAX_SHIFT
    assert learned([(20.0, 1, 16)] * 200).shift == -MAX_SHIFT


def test_the_shift_rises_where_more_is_accepted_than_promised_and_falls_where_less_is() -> None:
    assert learned([(2.0, 5, 16)]).shift > 0
    assert learned([(2.0, 1, 16)]).shift < 0
    assert learned([(2.0, 5, 16)] * 2).shift > learned([(2.0, 5, 16)]).shift
    # What counts is the promise: as many tokens from a tree that promised more is a disappointment.
    assert learned([(9.0, 5, 16)]).shift < 0


def test_nothing_changes_while_predictions_hold() -> None:
    nodes = round(PLAN.nodes)
    plan = replace(PLAN, nodes=float(nodes))
    found = learned([(2.0, 3, nodes)] * 50, plan)
    assert found.shift == pytest.approx(0.0, abs=1e-12)
    assert found.threshold == pytest.approx(plan.threshold)


def test_the_threshold_follows_tokens_a_second() -> None:
    assert learned([(2.0, 6, 16)] * 9).threshold > 1.2 * PLAN.threshold
    assert learned([(2.0, 1, 16)] * 9).threshold < 0.9 * PLAN.threshold
    # More nodes are a longer pass, by the profile's curve: the clock is not asked.
    assert learned([(2.0, 3, 60)] * 9).threshold < learned([(2.0, 3, 1)] * 9).threshold
    assert learned([(2.0, 6, 16)] * 9, replace(PLAN, threshold=0.0)).threshold == 0


def test_the_prompts_own_step_teaches_nothing() -> None:
    found = follower()
    found.learn(a_step(1, 0, is_prefill=True))
    assert (found.shift, found.threshold) == (0.0, follower().threshold)


@pytest.mark.parametrize(
    ("profile", "tree", "follows"),
    [
        (example_profile(PLAN), tree_settings(PLAN), True),
        (example_profile(PLAN), replace(tree_settings(PLAN), size=40), True),
        (example_profile(PLAN), replace(tree_settings(PLAN), threshold=0.3), False),
        (example_profile(PLAN), TreeSettings(policy="dyspec", threshold=0.05), False),
        (example_profile(example_plan("dyspec")), tree_settings(PLAN), False),
        (None, tree_settings(PLAN), False),
    ],
)
def test_only_trees_that_the_profile_planned_are_followed(
    profile: Profile | None, tree: TreeSettings, follows: bool
) -> None:
    assert (make_follower(profile, tree, temperature=0.8) is not None) == follows


def grown_with(outcomes: Sequence[tuple[float, int, int]]) -> list[tuple[float, float]]:
    """Threshold and shift that each step's tree was grown with, for steps of these outcomes."""
    used: list[tuple[float, float]] = []
    found = follower()

    def make(policy: OpenPolicy) -> Grow:
        assert policy.acceptance is not None
        shift = float(policy.acceptance.slot.biases[-1] - ACCEPTANCE.slot.biases[-1])
        used.append((policy.settings.threshold, round(shift, 6)))
        return lambda _root, _depth, _branches=None: a_tree(outcomes[len(used) - 1][0])

    grow = following(POLICY, found, make)

    for _, tokens, drafted in outcomes:
        grow(0, 24)
        found.learn(a_step(tokens, drafted))
    return used


@settings(max_examples=50)
@given(OUTCOMES, OUTCOMES)
def test_a_tree_is_grown_with_what_was_known_before_it(
    past: list[tuple[float, int, int]], future: list[tuple[float, int, int]]
) -> None:
    """Two texts of the same past: their next trees are grown alike, whatever those turn out to be."""
    one = grown_with([*past, *future, (0.0, 1, 0)])
    other = grown_with([*past, (20.0, 25, 768), *future])
    assert one[: len(past) + 1] == other[: len(past) + 1]


def test_a_tree_is_grown_with_all_that_was_known_before_it() -> None:
    """Not a step late: the second tree knows the first step."""
    assert len({grown_with([(2.0, tokens, 16), (2.0, 1, 16)])[1] for tokens in (1, 3, 25)}) == 3


# On the built-in pair


@pytest.fixture(scope="module")
def profile() -> Profile:
    plans = (
        example_plan(draw="chosen", threshold=0.02, size=32, depth=8, nodes=20.0),
        example_plan(draw="sampled", threshold=0.02, size=32, depth=8, nodes=20.0),
    )
    return example_profile(*plans, acceptance=ACCEPTANCE.to_document())


@pytest.fixture(scope="module", params=[0.0, 0.8])
def engine(request: pytest.FixtureRequest, profile: Profile) -> Iterator[Engine]:
    """Of the plan for a temperature."""
    tree = tree_settings(profile.plans[[0.0, 0.8].index(request.param)].best)
    with Engine.from_pair(open_pair(None, None), tree=tree, profile=profile, self_check=False) as made:
        yield made


@pytest.fixture
def settings_used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Threshold and shift of every tree that is grown."""
    used: list[tuple[float, float]] = []
    right = choose.make_grow

    def remember(policy: OpenPolicy, *arguments: Any, **options: Any) -> Grow:
        assert policy.acceptance is not None
        used.append((policy.settings.threshold, float(policy.acceptance.slot.biases[-1])))
        return right(policy, *arguments, **options)

    monkeypatch.setattr(choose, "make_grow", remember)
    return used


PROMPT = "def read_lines(path):\n    "


def test_the_same_seed_gives_the_same_text_again(engine: Engine, settings_used: list[tuple[float, float]]) -> None:
    temperature = 0.8 if engine.tree.draw == "sampled" else 0.0
    sampling = SamplingSettings(temperature=temperature)
    first, again = (engine.generate(PROMPT, max_new_tokens=60, sampling=sampling, seed=3) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert [step.num_drafted for step in first.steps] == [step.num_drafted for step in again.steps]
    half = len(settings_used) // 2
    assert settings_used[:half] == settings_used[half:]
    assert len(set(settings_used)) > 5, "nothing was followed"


def test_greedy_text_is_that_of_plain_decoding(engine: Engine) -> None:
    with Engine.from_pair(open_pair(None, None), tree=TreeSettings(policy="none"), self_check=False) as plain:
        expected = plain.generate(PROMPT, max_new_tokens=60, sampling=SamplingSettings()).token_ids
    assert engine.generate(PROMPT, max_new_tokens=60, sampling=SamplingSettings()).token_ids == expected


# On tables


def followed_p_value(plan: Plan, *, count: int = 1_000, seed: int = 7) -> float:
    """The p-value of texts, each followed by itself, against the target's distribution."""
    sampling, profile = SamplingSettings(temperature=1.0), example_profile(plan)
    policy = replace(open_policy(tree_settings(plan)), acceptance=ACCEPTANCE)
    models, probs = table_session(
        Situation(sampling=sampling), policy.settings, dtype=torch.float32, seed=seed, length=NUM_TOKENS + 1
    )
    generator = torch.Generator().manual_seed(seed)
    settings = TextSettings(sampling=sampling, max_new_tokens=NUM_TOKENS + 1, cache_rows=(8, 8))
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=NUM_TOKENS), 0)
    for _ in range(count):
        session = start_session(models.target, models.drafter, policy, settings, generator, profile=profile)
        steps = continue_text(session, torch.tensor(PROMPT_IDS), policy)
        counts[tuple(token for step in steps for token in step.tokens)[:NUM_TOKENS]] += 1
    return law_p_value(counts, {text: text_probability(probs, text) for text in counts})


@pytest.fixture
def nervous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that a single step sways."""
    monkeypatch.setattr(adapt, "MEMORY", 0.2)
    monkeypatch.setattr(adapt, "RATE", 3.0)


TABLE_PLANS = {
    draw: example_plan(draw=draw, size=6, depth=3, threshold=0.2, tokens=2.2, nodes=4.0)
    for draw in ("sampled", "chosen")
}


@pytest.mark.usefixtures("nervous")
@pytest.mark.parametrize("draw", TABLE_PLANS)
def test_followed_texts_have_the_targets_distribution(draw: str, settings_used: list[tuple[float, float]]) -> None:
    assert followed_p_value(TABLE_PLANS[draw]) > 1e-4
    assert len(set(settings_used)) > 3, "nothing was followed"


@pytest.mark.usefixtures("nervous")
@pytest.mark.parametrize(
    "is_dropped",
    [
        lambda found, tree: tree.draft_probs[0, tree.tokens[1]] <= found.threshold,
        lambda found, _tree: found._expected < found._predicted,
    ],
    ids=["a threshold for its own token", "a shift by its own promise"],
)
def test_a_tree_that_is_dropped_for_its_own_tokens_is_caught(
    is_dropped: Callable[[Follower, TokenTree], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def peeking(policy: OpenPolicy, found: Follower, make: Any) -> Grow:
        right = following(policy, found, make)

        def grow(root: int, max_depth: int, _branches: Tensor | None = None, /) -> TokenTree:
            tree = right(root, max_depth)
            if tree.num_nodes > 1 and is_dropped(found, tree):
                return root_only(root, draw=tree.draw, vocab=VOCAB, device=CPU)
            return tree

        return grow

    monkeypatch.setattr(choose, "following", peeking)
    assert followed_p_value(TABLE_PLANS["sampled"]) < 1e-6
