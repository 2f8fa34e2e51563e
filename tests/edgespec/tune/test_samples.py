"""Samples: what one large tree says about the smaller ones, and that sampling a text decodes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.grow import Grow, GrowthAlone, batched
from edgespec.grow.acceptance import default_acceptance
from edgespec.grow.growing import GrowingTree
from edgespec.grow.policies import OpenPolicy, make_grow, open_policy
from edgespec.pair.pair import open_pair
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import TextNoise
from edgespec.train.records import expected_tokens, node_values
from edgespec.tree.policies import DRAWS, POLICIES
from edgespec.tree.settings import COUPLED_DRAFT_TEMPERATURE
from edgespec.tree.token_tree import TokenTree, root_only
from edgespec.tune import samples
from edgespec.tune.entrants import Contender, contenders, rank_values
from edgespec.tune.samples import Samples, Text, in_groups, merged, path_values, sample_text, start_text, tree_sample
from edgespec.verify import accept_alone
from edgespec.verify.rows import TargetRows
from edgespec.verify.rules import verifier
from profiles.cost import Curve, GrowthCost, StepCosts
from profiles.tuner import Entrant, TreeSample, choose

MODEL = default_acceptance()
SIZE, DEPTH = 24, 8
ALL = contenders(size=SIZE, depth=DEPTH)
NAMES = {"-".join(contender.key): contender for contender in ALL}
COUPLED = [contender for contender in ALL if contender.draw == "coupled"]
# Trees that are a function of the text, and of its noise, alone
DETERMINISTIC = [
    "adaptive-coupled", "opt-tree-coupled", "opt-tree-chosen", "eagle2-coupled", "eagle2-chosen", "sequoia-coupled",
    "sequoia-chosen", "chain-coupled", "chain-chosen",
]  # fmt: skip


def recorded(sampling: SamplingSettings) -> list[Contender]:
    """Contenders whose draft is sampled as that of adaptive trees is."""
    adaptive = TreeSettings().draft_sampling(sampling)
    return [contender for contender in COUPLED if contender.settings.draft_sampling(sampling) == adaptive]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tree = TreeSettings(policy="opt-tree", size=4 * SIZE, depth=DEPTH)  # room to look at several trees in one pass
    with Engine.from_pair(open_pair(None, None), tree=tree, context_tokens=256, self_check=False) as made:
        yield made


@pytest.fixture(scope="module")
def ids(engine: Engine) -> list[int]:
    return engine.encode("class Queue:\n    def __init__(self, size):\n        self.size = ")


def grown(
    engine: Engine, ids: list[int], contender: Contender, temperature: float, **limits: Any
) -> tuple[TokenTree, Tensor, TreeSample]:
    """The contender's tree behind the prompt, p [n, vocab] at its nodes, and what the tuner sees of both."""
    sampling = SamplingSettings(temperature=temperature)
    small = {**{name: getattr(contender.settings, name) for name in ("policy", "draw")}, **limits}
    settings = TreeSettings(**small) if limits else contender.settings
    generator = torch.Generator().manual_seed(1)
    text = start_text(engine, ids, sampling=sampling, tree=contender.settings, generator=generator)
    noise = TextNoise(seed=1, key=0, vocab=text.target.vocab, device=engine.device)
    noise.start(len(ids))
    drafter = text.drafting(settings, sampling)
    grow = make_grow(open_policy(settings).with_acceptance(MODEL), drafter, sampling=sampling, device=engine.device,
                     generator=generator, noise=noise, keeps_draft_probs=True)  # fmt: skip
    tree = batched.grown(grow(text.root, settings.num_layers), drafter)
    rows = TargetRows(text.target.look(tree), text.target.logits, sampling, vocab=text.target.vocab)
    p = rows.all_probs()
    path = accept_alone(verifier(sampling, tree.draw, noise)(tree, rows, generator)).path
    values = path_values(tree, path) if tree.draw == "coupled" else node_values(tree, p)
    rates = rank_values(MODEL, temperature=temperature, draw=contender.draw)
    return tree, p, tree_sample(tree, values, contender, rates)


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_best_nodes_of_a_large_tree_are_the_tree_of_a_small_budget(
    name: str, temperature: float, engine: Engine, ids: list[int]
) -> None:
    large = grown(engine, ids, NAMES[name], temperature)[2]
    for size, depth in ((1, 1), (5, 4), (9, 3), (16, 8)):
        limits = {"draft_tokens": depth} if name.startswith("chain") else {"size": size, "depth": depth}
        small = grown(engine, ids, NAMES[name], temperature, **limits)[2]
        cut = large.cut(size=size, depth=depth, threshold=-np.inf)
        # The large tree may have fewer nodes of so little depth than the small one had room for: it says no more.
        count = len(cut.scores)
        assert count in {len(small.scores), int((large.depths <= depth).sum())}
        np.testing.assert_allclose(small.scores[:count], cut.scores, rtol=1e-4)
        if not name.startswith("sequoia"):  # whose nodes tie: the child 0, 1 is worth what 1, 0 is
            np.testing.assert_allclose(small.values[:count], cut.values, rtol=1e-4, atol=1e-7)
            np.testing.assert_array_equal(small.depths[:count], cut.depths)
            if count == len(small.scores):
                np.testing.assert_array_equal(small.inner(depth), cut.inner(depth))


def test_a_threshold_cuts_a_large_tree_as_growth_would(engine: Engine, ids: list[int]) -> None:
    adaptive = NAMES["adaptive-coupled"]
    large = grown(engine, ids, adaptive, 0.0)[2]
    threshold = float(large.scores[9] + large.scores[10]) / 2
    small = grown(engine, ids, adaptive, 0.0, size=SIZE, depth=DEPTH, threshold=threshold)[2]
    cut = large.cut(size=SIZE, depth=DEPTH, threshold=threshold)
    assert len(cut.scores) == 10
    np.testing.assert_allclose(small.scores, cut.scores, rtol=1e-4)
    np.testing.assert_allclose(small.values, cut.values, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_of_its_whole_tree_and_falls_from_parent_to_child(
    name: str, engine: Engine, ids: list[int]
) -> None:
    tree, p, sample = grown(engine, ids, NAMES[name], 0.8)
    if tree.draw == "coupled":
        assert set(sample.values.tolist()) <= {0.0, 1.0}, "which nodes are accepted is known"
    else:
        assert sample.tokens == pytest.approx(expected_tokens(tree, p), rel=1e-5)
    scores = samples._scores(tree, NAMES[name], rank_values(MODEL, temperature=0.8, draw=NAMES[name].draw))
    assert bool((scores[1:] <= scores[tree.parents[1:]]).all())
    # So the m best are connected: a node comes before the first of its children.
    nodes = np.arange(len(sample.scores))
    has_children = sample.first_child < len(nodes)
    assert has_children.any()
    assert (sample.first_child[has_children] > nodes[has_children]).all()


def test_every_lossless_policy_contends_with_every_draw_it_has() -> None:
    contending = POLICIES.keys() - {"none", "static"}  # a tree file is the user's own
    assert {contender.key for contender in ALL} == {
        (name, draw) for name in contending for draw in POLICIES[name].draws
    }
    assert all(contender.settings.is_lossless and contender.settings.num_nodes <= SIZE for contender in ALL)


def test_the_guide_comes_first_and_presets_last() -> None:
    assert ALL[0].key == ("adaptive", "coupled")  # whose acceptance is learned
    for draw in DRAWS:
        is_budgeted = [contender.is_budgeted for contender in ALL if contender.draw == draw]
        assert is_budgeted == sorted(is_budgeted, reverse=True)


def test_small_budgets_leave_out_presets_that_do_not_fit() -> None:
    assert not {"specinfer", "mcsd"} & {contender.settings.policy for contender in contenders(size=8, depth=8)}
    assert max(contender.settings.num_nodes for contender in contenders(size=8, depth=8)) == 8


# Texts


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """The texts that sampling started."""
    found: list[Text] = []
    right = samples.start_text

    def remember(*arguments: Any, **options: Any) -> Text:
        found.append(right(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(samples, "start_text", remember)
    return found


@pytest.mark.parametrize(
    ("guide", "temperature"), [("adaptive-coupled", 0.8), ("adaptive-coupled", 0.0), ("dyspec-sampled", 0.8)]
)
def test_sampling_extends_the_text_and_both_caches_hold_it(
    guide: str, temperature: float, engine: Engine, ids: list[int], started: list[Text]
) -> None:
    contending = [NAMES[guide], *(contender for name, contender in NAMES.items() if name != guide)]
    sampling, into = SamplingSettings(temperature=temperature), Samples()
    extended = sample_text(engine, ids, contending, MODEL, into, sampling=sampling, steps=2, seed=1)
    assert extended[: len(ids)] == ids
    assert len(extended) >= len(ids) + 1 + 2
    assert {key: len(trees) for key, trees in into.trees.items()} == {contender.key: 2 for contender in ALL}
    assert len(into.records) == 2 * len(recorded(sampling)) > 0, (
        "what is drafted otherwise says nothing of adaptive trees"
    )
    (text,) = started
    root = torch.tensor(extended[-1:])
    tree = root_only(extended[-1], draw="chosen", device=engine.device)
    assert list(text.target.cache.ids) == extended[:-1]
    assert list(text.drafter.cache.ids) == extended[: len(extended) - 1 - text.drafter.num_pending]
    assert text.drafter.num_pending <= 1
    p = text.target.logits(text.target.look(tree))
    q = text.drafter.expand(root, torch.tensor([-1]))
    fresh = start_text(
        engine, extended[:-1], sampling=sampling, tree=contending[0].settings, generator=torch.Generator()
    )
    fresh.drafter.sampling = text.drafter.sampling
    torch.testing.assert_close(p, fresh.target.logits(fresh.target.look(tree)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q, fresh.drafter.expand(root, torch.tensor([-1])), rtol=1e-4, atol=1e-6)


def test_contenders_draw_as_their_own_policy_does(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 drafts differ in temperature: one drafter serves all, each with its own."""
    seen: dict[tuple[str, str], SamplingSettings] = {}
    right = samples.make_grow

    def remember(policy: OpenPolicy, drafter: Any, **options: Any) -> Grow:
        seen[policy.settings.policy, policy.draw] = drafter.sampling
        return right(policy, drafter, **options)

    monkeypatch.setattr(samples, "make_grow", remember)
    for temperature, temperatures in ((0.0, {0.2, 0.6, 0.8}), (1.0, {1.0, COUPLED_DRAFT_TEMPERATURE})):
        sampling = SamplingSettings(temperature=temperature, top_p=0.8)
        sample_text(engine, ids, ALL, MODEL, Samples(), sampling=sampling, steps=1, seed=1)
        expected = {contender.key: contender.settings.draft_sampling(sampling) for contender in ALL}
        assert seen == expected
        assert {draws.temperature for draws in expected.values()} == temperatures


def test_greedy_sampling_adds_what_plain_decoding_adds(engine: Engine, ids: list[int]) -> None:
    sampling = SamplingSettings()
    extended = sample_text(engine, ids, ALL[:3], MODEL, Samples(), sampling=sampling, steps=4, seed=1)
    count = len(extended) - len(ids)
    assert tuple(extended[-count:]) == engine.generate(ids, max_new_tokens=count, sampling=sampling).token_ids


def test_a_tree_of_no_nodes_counts_as_one_token(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a policy that gives up where texts are hard would be judged by the easy ones alone."""
    right = samples.make_grow

    def nothing(policy: OpenPolicy, drafter: Any, **options: Any) -> Grow:
        if policy.settings.policy != "c2t":
            return right(policy, drafter, **options)

        def gives_up(root: int, _max_depth: int) -> GrowthAlone:
            tree = GrowingTree(root, device=options["device"], keeps_draft_probs=True)
            yield from tree.expand()
            return tree.finished(policy.draw)

        return gives_up

    monkeypatch.setattr(samples, "make_grow", nothing)
    into = Samples()
    sampling = SamplingSettings(temperature=0.7)
    sample_text(engine, ids, ALL, MODEL, into, sampling=sampling, steps=2, seed=1)
    assert [tree.tokens for tree in into.trees["c2t", "chosen"]] == [1.0, 1.0]
    trees = into.trees["c2t", "coupled"]
    assert [tree.tokens for tree in trees] == [1.0, 1.0]
    assert len(into.records) == 2 * len(recorded(sampling)), "what the target took at the root is known"
    free = GrowthCost(base_s=0.1, layer_s=0.0, node_s=0.0, rows_per_inner=1.0)
    contender = Entrant(policy="c2t", draw="coupled", samples=trees, growth=free)
    curve = Curve((0.0, 24.0), (1.0, 2.0))
    costs = StepCosts(verify=curve, draft=Curve((1.0,), (0.1,)), rest_s=0.1, plain_step_s=1.1)
    best = choose([contender], costs, sizes=[1, 4], depths=[1, 4]).ranked[0]
    assert (best.tokens, best.nodes) == (1.0, 0.0)


def test_the_guide_alone_decides_how_a_text_goes_on(engine: Engine, ids: list[int]) -> None:
    """Contenders that drop out change nothing about greedy texts, nor about what is seen of the others."""
    sampling = SamplingSettings()
    alone, all_of_them = Samples(), Samples()
    guide = NAMES["adaptive-coupled"]
    others = [contender for contender in ALL if contender is not guide]
    one = sample_text(engine, ids, [guide], MODEL, alone, sampling=sampling, steps=2, seed=1)
    assert one == sample_text(engine, ids, [guide, *others], MODEL, all_of_them, sampling=sampling, steps=2, seed=1)
    for found, expected in zip(alone.trees[guide.key], all_of_them.trees[guide.key], strict=True):
        assert found.tokens == pytest.approx(expected.tokens, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_coupled_trees_are_valued_by_the_way_that_the_texts_noise_takes(
    temperature: float, engine: Engine, ids: list[int]
) -> None:
    """A tree beside the guide is worth what it yields as the guide: then its text is the same, whoever guides."""
    sampling = SamplingSettings(temperature=temperature)

    def sampled(guide: Contender) -> tuple[list[int], Samples]:
        into = Samples()
        others = [contender for contender in COUPLED if contender is not guide]
        text = sample_text(engine, ids, [guide, *others], MODEL, into, sampling=sampling, steps=3, seed=2)
        return text[len(ids) :], into

    guides = [contender for contender in COUPLED if contender.settings.policy in {"adaptive", "c2t", "chain"}]
    texts = {contender.key: sampled(contender) for contender in guides}
    longest = max((text for text, _ in texts.values()), key=len)
    for key, (text, into) in texts.items():
        assert text == longest[: len(text)]
        assert len(text) == 1 + sum(tree.tokens for tree in into.trees[key])
        for other in guides:
            assert texts[other.key][1].trees[key][0].tokens == into.trees[key][0].tokens


# Looking at several trees in one pass


def test_a_merged_tree_holds_every_path_of_each_once(engine: Engine, ids: list[int]) -> None:
    trees = [grown(engine, ids, NAMES[name], 0.0)[0] for name in ("opt-tree-chosen", "eagle2-chosen", "chain-chosen")]
    forest, places = merged(trees)

    def paths(tree: TokenTree) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return found

    all_paths = paths(forest)
    assert len(set(all_paths)) == len(all_paths) < sum(tree.num_nodes for tree in trees)
    for tree, place in zip(trees, places, strict=True):
        assert [all_paths[node] for node in place.tolist()] == paths(tree)


def test_groups_keep_the_order_and_the_limit(engine: Engine, ids: list[int]) -> None:
    trees = [(contender, grown(engine, ids, contender, 0.0)[0]) for contender in ALL[:6]]
    groups = in_groups(trees, most_nodes=50)
    assert [pair for group in groups for pair in group] == trees
    assert all(sum(tree.num_nodes - 1 for _, tree in group) <= 50 for group in groups)
    assert len(groups) < len(trees)
    assert [len(group) for group in in_groups(trees, most_nodes=1)] == [1] * 6


def test_probabilities_of_a_merged_pass_are_those_of_a_pass_of_its_own(engine: Engine, ids: list[int]) -> None:
    sampling = SamplingSettings(temperature=0.8)
    alone = {}
    for name in ("opt-tree-chosen", "sequoia-chosen"):
        alone[name] = grown(engine, ids, NAMES[name], 0.8)
    text = start_text(engine, ids, sampling=sampling, tree=NAMES["opt-tree-chosen"].settings,
                      generator=torch.Generator().manual_seed(1))  # fmt: skip
    forest, places = merged([tree for tree, _, _ in alone.values()])
    hidden = text.target.look(forest)
    for (_, p, _), place in zip(alone.values(), places, strict=True):
        found = to_probs(text.target.logits(hidden[place]), sampling)
        torch.testing.assert_close(found, p, rtol=1e-4, atol=1e-6)


def test_all_sampled_trees_are_drawn_with_the_same_luck(engine: Engine, ids: list[int]) -> None:
    """One node is one node then, whoever grew it: between policies there is no chance to pay for."""
    sampled = [contender for contender in ALL if contender.draw == "sampled" and contender.is_nested]
    found = Samples()
    sample_text(engine, ids, sampled, MODEL, found, sampling=SamplingSettings(temperature=1.2), steps=6, seed=3)
    first, *others = (
        [tree.cut(size=1, depth=1, threshold=-np.inf).tokens for tree in found.trees[one.key]] for one in sampled
    )
    assert len(set(first)) > 1, "and another at the next step"
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-4)
