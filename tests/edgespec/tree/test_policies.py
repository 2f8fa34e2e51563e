"""What a policy's record promises: it is complete, and what it says of settings and draws holds when trees grow."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.grow import batched
from edgespec.grow.policies import OpenPolicy, grow_below_branches, make_grow, open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling.noise import TextNoise
from edgespec.tree.policies import DEFAULT_POLICY, DRAWS, POLICIES, Policy, policy_named, users_of
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from tests.edgespec.grow.test_best_first import FunctionDrafter, random_q

CPU = torch.device("cpu")
VOCAB = 8
WARM = SamplingSettings(temperature=0.8)
FIELDS = {field.name for field in fields(TreeSettings)}
OF_EVERY_POLICY = {"policy", "draw", "draft_temperature", "lookup"}
# A value of every setting that a policy can do without, other than the default
GIVEN: dict[str, Any] = {
    "size": 9, "depth": 5, "threshold": 0.1, "max_children": 3, "branching": (2, 1), "fork": (2, 3),
    "draft_tokens": 3, "tree_file": Path("tree.json"), "stop_gain": 0.2, "reranked": False, "stop_depths": (2,),
    "stop_log_probability": -0.5, "classifier": Path("c.json"), "stop_model": Path("s.safetensors"),
    "confidence": 0.3, "acceptance": Path("a.json"), "target_width": 2,
}  # fmt: skip

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def settings_of(policy: Policy, folder: Path, **given: Any) -> TreeSettings:
    """Settings of the policy, with a file for the shape where it needs one."""
    if policy.uses("tree_file"):
        given["tree_file"] = folder / "tree.json"
        given["tree_file"].write_text(json.dumps([[0], [1], [0, 0]]), encoding="utf-8")
    return TreeSettings(policy=policy.name, **given)


def test_a_policy_is_known_by_its_records_name() -> None:
    assert all(policy_named(name).name == name for name in POLICIES)
    assert DEFAULT_POLICY in POLICIES


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(EdgespecError, match="`policy=oak` is unknown") as error:
        policy_named("oak")
    assert error.value.code == "E_SETTING"
    assert error.value.fix == f"Choose one of: {', '.join(POLICIES)}."


@every_policy
def test_a_records_settings_are_tree_settings(policy: Policy) -> None:
    assert policy.settings <= FIELDS - OF_EVERY_POLICY


def test_every_tree_setting_is_some_policys_or_every_policys() -> None:
    of_some = {setting for policy in POLICIES.values() for setting in policy.settings}
    assert of_some == FIELDS - OF_EVERY_POLICY == GIVEN.keys()
    assert all(users_of(setting) == ", ".join(POLICIES) for setting in OF_EVERY_POLICY)


@every_policy
def test_a_policy_takes_the_draws_of_its_record_and_refuses_others(policy: Policy, tmp_path: Path) -> None:
    assert set(policy.draws) <= set(DRAWS)
    for draw in DRAWS:
        if draw in policy.draws:
            assert settings_of(policy, tmp_path, draw=draw).draw == draw
            continue
        with pytest.raises(EdgespecError) as error:
            settings_of(policy, tmp_path, draw=draw)
        assert error.value.what == f"`policy={policy.name}` has no children of `draw={draw}`."
        others = [other.name for other in POLICIES.values() if draw in other.draws]
        assert error.value.fix.startswith(f"Its own: {', '.join(policy.draws)}.")
        assert error.value.fix.endswith(f"with {draw} children: {', '.join(others)}.")


def test_an_unknown_draw_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(EdgespecError, match="`draw=guessed` is unknown") as error:
        TreeSettings(draw="guessed")
    assert error.value.fix == "Choose one of: coupled, sampled, chosen."


def test_several_branches_of_the_target_are_no_coupled_ones() -> None:
    """The longest of several is taken: that has no noise of its own to be decided by."""
    with pytest.raises(EdgespecError, match="`target_width=2` takes the longest of several branches") as error:
        TreeSettings(policy="mcsd", draw="coupled", target_width=2)
    assert error.value.fix == "Use `draw=sampled` or `draw=chosen`."
    for draw in (None, "sampled", "chosen"):
        assert not TreeSettings(policy="mcsd", draw=draw, target_width=2).is_lossless


@every_policy
def test_a_policy_refuses_every_setting_that_it_does_not_use(policy: Policy, tmp_path: Path) -> None:
    for name in GIVEN.keys() - policy.settings:
        with pytest.raises(EdgespecError, match=f"is not used by `policy={policy.name}`") as error:
            settings_of(policy, tmp_path, **{name: GIVEN[name]})
        assert error.value.fix == f"It belongs to: {users_of(name)}."


@every_policy
def test_every_setting_that_a_policy_uses_can_be_given(policy: Policy, tmp_path: Path) -> None:
    decides = {} if policy.has_classifier else {"stop_model": Path("s.safetensors")}
    for name in policy.settings - {"tree_file"}:
        beside = decides if name == "confidence" else {}
        assert getattr(settings_of(policy, tmp_path, **{name: GIVEN[name]}, **beside), name) == GIVEN[name]


@every_policy
def test_the_budget_bounds_the_nodes(policy: Policy, tmp_path: Path) -> None:
    if policy.budget is None:
        assert not {"size", "draft_tokens"} & policy.settings
        return
    assert settings_of(policy, tmp_path, **{policy.budget: 5}).num_nodes == 5


def text_noise(seed: int) -> TextNoise:
    return TextNoise(seed=seed, key=0, vocab=VOCAB, device=CPU)


def grown(
    policy: OpenPolicy, *, sampling: SamplingSettings = WARM, seed: int = 0, keeps_draft_probs: bool = False
) -> TokenTree:
    """A tree of three layers at most, with the noise of that seed, and otherwise the same luck."""
    drafter = FunctionDrafter(random_q(VOCAB, 1.5, 0))
    draws = TextDraws(
        sampling=sampling, device=CPU, generator=torch.Generator().manual_seed(0), noise=text_noise(seed),
        keeps_draft_probs=keeps_draft_probs,
    )  # fmt: skip
    grow = make_grow(policy, drafter, draws)
    return batched.grown(grow(0, 3), drafter)


GROWN = [(policy, draw) for policy in POLICIES.values() if policy.needs_draft for draw in policy.draws]


@pytest.mark.parametrize(("policy", "draw"), GROWN, ids=[f"{policy.name}-{draw}" for policy, draw in GROWN])
def test_every_policy_grows_a_tree_in_each_of_its_draws(policy: Policy, draw: str, tmp_path: Path) -> None:
    limits = {} if policy.budget is None else {policy.budget: 6}
    opened = open_policy(settings_of(policy, tmp_path, **limits, draw=draw))
    tree = grown(opened)
    assert tree.draw == opened.draw == draw
    assert 1 < tree.num_nodes <= 1 + opened.settings.num_nodes
    assert (tree.draft_probs is not None) == (draw == "sampled"), "kept where the rule needs it"
    asked = grown(opened, keeps_draft_probs=True)
    assert asked.draft_probs is not None
    assert torch.equal(asked.tokens, tree.tokens), "records change nothing"


@pytest.mark.parametrize(("policy", "draw"), GROWN, ids=[f"{policy.name}-{draw}" for policy, draw in GROWN])
def test_the_texts_noise_decides_on_coupled_children_alone_and_not_on_a_greedy_targets(
    policy: Policy, draw: str, tmp_path: Path
) -> None:
    limits = {} if policy.budget is None else {policy.budget: 6}
    opened = open_policy(settings_of(policy, tmp_path, **limits, draw=draw))
    for sampling, differs in ((WARM, draw == "coupled"), (SamplingSettings(), False)):
        found = {tuple(grown(opened, sampling=sampling, seed=seed).tokens.tolist()) for seed in range(8)}
        assert (len(found) > 1) == differs


@every_policy
def test_a_policy_draws_as_its_record_says_first(policy: Policy, tmp_path: Path) -> None:
    assert open_policy(settings_of(policy, tmp_path)).draw == policy.draws[0]


@every_policy
def test_a_policy_without_a_tree_grows_none(policy: Policy, tmp_path: Path) -> None:
    drafts = policy.kind != "none"
    settings = settings_of(policy, tmp_path)
    assert (settings.num_nodes > 0, settings.num_layers > 0) == (drafts, drafts)


def test_a_static_shape_takes_the_roots_children_from_the_target(tmp_path: Path) -> None:
    wide = [policy for policy in POLICIES.values() if policy.uses("target_width")]
    assert wide
    assert {policy.kind for policy in wide} == {"static"}
    for policy in wide:
        drafter = FunctionDrafter(random_q(VOCAB, 1.5, 0))
        draws = TextDraws(sampling=WARM, device=CPU, generator=torch.Generator().manual_seed(0), noise=text_noise(0))
        settings = settings_of(policy, tmp_path, branching=(2, 1), target_width=2)
        below = grow_below_branches(open_policy(settings), drafter, draws)
        tree = batched.grown(below(0, 3, torch.tensor([6, 3])), drafter)
        assert tree.tokens[tree.parents == 0].tolist() == [6, 3]
