"""Self-tuning: on simulated machines it finds what pays, in limited moves; on the built-in pair it changes no text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.draft.calls import DraftCalls
from edgespec.pair.pair import open_pair
from edgespec.placement.pair_setup import set_up
from edgespec.placement.profile_trees import tree_settings
from edgespec.placement.run_config import resolve_run_config
from edgespec.tuning.costs import GrowthCosts, StepCosts
from edgespec.tuning.settings import TuningSettings
from edgespec.tuning.tree_choice import SIZES, TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from edgespec.tuning.tuner import MAX_SAMPLINGS, MIN_LIMIT, TextTuning, Tuner, may_follow_clock
from profiles.experts import Routing
from tests.edgespec.tuning.simulated import Done, Machine, Pair, best_fixed, mixture, simulate, tokens_per_s
from tests.profiles.examples import example_plan, example_profile

LIMITS = [size for size in SIZES if MIN_LIMIT <= size <= 256]
MACHINES = {
    "a flat pass and a free draft": Machine(pass_s=lambda _rows: 1.0, layer_s=1e-4),
    "a slow link": Machine(pass_s=lambda rows: max(1.0, 0.006 * rows), layer_s=5e-3, node_s=1e-4),
    "a pass that is flat to 128 nodes": Machine(pass_s=lambda rows: 1.0 if rows <= 129 else 3.0, layer_s=5e-3),
    "weights in memory": Machine(pass_s=lambda rows: 0.05 + 0.0024 * rows, layer_s=2e-3, node_s=2e-4),
    "a draft of a fifth": Machine(pass_s=lambda rows: 1.0 + 0.01 * rows, layer_s=0.2),
}
HOPELESS = {
    "rows as dear as passes": Machine(pass_s=lambda rows: 0.01 * rows, layer_s=1e-3),
    "a draft as slow as the target": Machine(pass_s=lambda _rows: 1.0, layer_s=1.0),
}

FINE, COARSE = Routing(num_experts=128, chosen=4, spread=0.75), Routing(num_experts=8, chosen=2, spread=0.9)
# Passes over mixtures cost the more the first rows they have: the curve is steep, and then ever flatter.
MIXTURES = {
    "experts from the disk, none kept": mixture(dense_s=0.02, all_experts_s=10.0, kept=0.0, layer_s=2e-3, routing=FINE),
    "half of the experts kept": mixture(dense_s=0.1, all_experts_s=2.0, kept=0.5, layer_s=2e-3, routing=FINE),
    "most experts kept": mixture(dense_s=0.1, all_experts_s=2.0, kept=0.9, layer_s=2e-3, routing=FINE),
    "few large experts, soon all of them": mixture(
        dense_s=0.02, all_experts_s=1.0, kept=0.0, layer_s=2e-3, routing=COARSE
    ),
}


def new_choice(size: int = 8) -> TreeChoice:
    return TreeChoice(StepCosts(), LIMITS, start=TreeLimits(size))


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_it_comes_near_the_best_fixed_trees(machine: Machine) -> None:
    best = best_fixed(machine)
    choice, pair = new_choice(), Pair()
    simulate(choice, machine, pair, steps=60)
    assert tokens_per_s(simulate(choice, machine, pair, steps=250)) > 0.85 * best


def test_where_one_pass_guesses_the_whole_tree_deep_trees_are_not_given_up() -> None:
    """A draft call a layer, as other drafts take it, would make them shallow: 0.83 of the best."""
    machine = Machine(pass_s=lambda rows: 1.0 + 0.005 * rows, tree_s=1.0, layer_s=1e-3)
    steps: list[Done] = []
    for seed in range(12):
        costs = StepCosts(growth=GrowthCosts(calls=DraftCalls(num_places=24, num_rows=25)))
        choice, pair = TreeChoice(costs, LIMITS, start=TreeLimits(8)), Pair(seed=seed)
        simulate(choice, machine, pair, steps=20)
        steps += simulate(choice, machine, pair, steps=200)
    assert tokens_per_s(steps) > 0.88 * best_fixed(machine)


@pytest.mark.parametrize("first", [(0.1, 0.5), (0.45, 0.95)], ids=["a poor draft", "a good draft"])
@pytest.mark.parametrize("machine", MIXTURES.values(), ids=MIXTURES)
def test_on_mixtures_it_is_within_a_tenth_of_the_best_fixed_trees_and_never_slower_than_plain(
    machine: Machine, first: tuple[float, float]
) -> None:
    best = best_fixed(machine, first=first)
    for seed in (7, 8):
        choice, pair = new_choice(), Pair(first=first, seed=seed)
        whole = simulate(choice, machine, pair, steps=480)
        assert tokens_per_s(whole[80:]) > 0.9 * best
        assert tokens_per_s(whole) > 0.95 / machine.pass_s(1)


@pytest.mark.parametrize("machine", HOPELESS.values(), ids=HOPELESS)
def test_where_no_tree_pays_it_decodes_plainly_and_seldom_looks_again(machine: Machine) -> None:
    choice, pair = new_choice(), Pair(first=(0.1, 0.4))
    whole = simulate(choice, machine, pair, steps=1000)
    assert choice.is_plain
    assert tokens_per_s(whole) > 0.97 / machine.pass_s(1)
    assert tokens_per_s(whole[200:]) > 0.98 / machine.pass_s(1)
    assert sum(step.nodes > 0 for step in whole[100:]) > 0, "it has stopped looking"


def test_trees_come_back_when_they_start_to_pay() -> None:
    choice, pair = new_choice(), Pair()
    is_dear = True
    machine = Machine(pass_s=lambda rows: 0.05 * rows if is_dear else 0.05, layer_s=0.001)
    simulate(choice, machine, pair, steps=100)
    assert choice.is_plain
    is_dear = False
    simulate(choice, machine, pair, steps=400)
    assert not choice.is_plain
    assert tokens_per_s(simulate(choice, machine, pair, steps=100)) > 3 / 0.05


def test_trees_go_when_they_stop_to_pay() -> None:
    choice, pair = new_choice(), Pair(seed=3)
    machine = MACHINES["weights in memory"]
    simulate(choice, machine, pair, steps=100)
    assert not choice.is_plain
    pair.first = (0.0, 0.02)  # nothing is accepted any more
    simulate(choice, machine, pair, steps=60)
    assert tokens_per_s(simulate(choice, machine, pair, steps=200)) > 0.95 / machine.pass_s(1)


@pytest.mark.parametrize("kept", [0.5, 1.3])
def test_promises_are_held_against_what_was_accepted(kept: float) -> None:
    choice, pair = new_choice(), Pair(first=(0.3, 0.7), kept=kept)
    steps = simulate(choice, MACHINES["weights in memory"], pair, steps=200)
    found = dict(zip(choice.yields.sizes, choice.yields.all(), strict=True))[choice.limits.size]
    grown = [step.tokens for step in steps[100:] if step.nodes]
    assert found.tokens == pytest.approx(sum(grown) / len(grown), rel=0.15)


@pytest.mark.parametrize("at", [0, 1, 2, 40])
def test_one_hiccup_changes_no_tree_for_long(at: int) -> None:
    machine = MACHINES["weights in memory"]
    shaken = Machine(pass_s=machine.pass_s, layer_s=machine.layer_s, node_s=machine.node_s,
                     slowness=lambda step: 100.0 if step == at else 1.0)  # fmt: skip
    after: list[Done] = []
    calm: list[Done] = []
    for seed in (3, 13, 23):
        for on, steps in ((shaken, after), (machine, calm)):
            choice = new_choice()
            simulate(choice, on, Pair(seed=seed), steps=at + 20)
            steps += simulate(choice, machine, Pair(seed=seed + 1), steps=300)
    assert tokens_per_s(after) > 0.9 * tokens_per_s(calm)


def test_a_busy_machine_is_recovered_from_within_20_steps() -> None:
    machine = MACHINES["weights in memory"]
    busy = Machine(pass_s=machine.pass_s, layer_s=machine.layer_s, node_s=machine.node_s,
                   slowness=lambda step: 3.0 if 100 <= step < 160 else 1.0, noise=0.2)  # fmt: skip
    before, during, after = [], [], []
    for seed in range(6):
        choice, pair = new_choice(), Pair(seed=seed)
        before += simulate(choice, busy, pair, steps=100)[40:]
        during += simulate(choice, busy, pair, steps=60, first=100)
        simulate(choice, busy, pair, steps=20, first=160)
        after += simulate(choice, busy, pair, steps=60, first=180)
    assert tokens_per_s(during) > 0.85 * tokens_per_s(before) / 3, "nothing better is known of a busy machine"
    assert tokens_per_s(after) > 0.9 * tokens_per_s(before)


def test_plain_passes_that_trees_slow_down_are_told_from_plain_decoding() -> None:
    """Trees ask for experts that push out those of plain passes: the first pass behind them says too little."""
    behind_trees = 0.0

    def pass_s(rows: int) -> float:
        nonlocal behind_trees
        behind_trees = 1.0 if rows > 1 else behind_trees / 2
        return 0.05 * (1 + behind_trees) if rows == 1 else 0.08 + 0.01 * (rows - 1)

    machine = Machine(pass_s=pass_s, layer_s=5e-3)
    speeds = []
    for seed in range(12):
        choice, pair = new_choice(), Pair(first=(0.3, 0.7), seed=seed)
        simulate(choice, machine, pair, steps=100)
        speeds.append(tokens_per_s(simulate(choice, machine, pair, steps=300)))
    assert min(speeds) > 0.9 / 0.05
    assert sum(speeds) / len(speeds) > 0.95 / 0.05


def test_a_trial_that_turns_out_hopeless_ends_with_its_first_tree() -> None:
    """Passes over small trees say that many rows cost little, and they cost twenty times as much."""
    machine = Machine(pass_s=lambda rows: 0.05 if rows == 1 else 0.1 if rows < 32 else 1.0, layer_s=1e-3)
    for seed in (1, 5):
        whole = simulate(new_choice(4), machine, Pair(first=(0.1, 0.5), seed=seed), steps=40)
        is_slow = [step.nodes > 30 for step in whole]
        assert any(is_slow)
        assert not any(one and other for one, other in pairwise(is_slow))


def test_sizes_move_by_a_factor_of_two_at_most() -> None:
    choice, pair, sizes = new_choice(), Pair(), []
    for _ in range(60):
        sizes.append(choice.limits.size)
        simulate(choice, MACHINES["a flat pass and a free draft"], pair, steps=1)
    assert max(sizes) == 256
    assert all(
        abs(LIMITS.index(one) - LIMITS.index(other)) <= TuningSettings().notches for one, other in pairwise(sizes)
    )


# The seam


@pytest.mark.parametrize(
    ("tree", "temperature", "may"),
    [
        (TreeSettings(), 0.0, True),
        (TreeSettings(), 0.8, True),
        (TreeSettings(policy="opt-tree", draw="chosen"), 0.8, False),
        (TreeSettings(policy="dyspec"), 0.8, False),
        (TreeSettings(policy="mcsd", target_width=2), 0.0, False),
    ],
)
def test_only_texts_that_do_not_depend_on_their_trees_follow_the_clock(
    tree: TreeSettings, temperature: float, may: bool
) -> None:
    assert may_follow_clock(tree, SamplingSettings(temperature=temperature)) is may


@pytest.mark.parametrize(
    ("largest_tree", "wanted", "expected"),
    [
        (TreeSettings(size=256), TreeLimits(8, 0.1, 0.2), TreeSettings(size=8, threshold=0.1, stop_gain=0.2)),
        (TreeSettings(policy="eagle2"), TreeLimits(8, 0.1, 0.2), TreeSettings(policy="eagle2", size=8)),
        (TreeSettings(policy="chain", draft_tokens=16), TreeLimits(3), TreeSettings(policy="chain", draft_tokens=3)),
        (TreeSettings(policy="mcsd"), TreeLimits(9), TreeSettings(policy="mcsd")),
    ],
)
def test_a_choice_is_spelled_in_the_settings_of_its_policy(
    largest_tree: TreeSettings, wanted: TreeLimits, expected: TreeSettings
) -> None:
    assert Tuner(TreeSettings(), largest_tree).settings(wanted) == expected


def test_it_begins_with_the_profiles_plan() -> None:
    plan = example_plan(threshold=0.03, size=32)
    tuner = Tuner(tree_settings(plan), TreeSettings(size=256), first_size=32, profile=example_profile(plan))
    choice = tuner.choice(SamplingSettings())
    choice.begin_step(0, 1)
    assert choice.in_step == TreeLimits(32, 0.03)
    assert choice.costs.passes(1).times_seen(1), "a plain pass need not be tried"


def test_ways_of_sampling_share_costs_and_begin_where_others_are() -> None:
    tuner = Tuner(TreeSettings(), TreeSettings(size=256))
    first = tuner.choice(SamplingSettings())
    simulate(first, MACHINES["a slow link"], Pair(), steps=40)
    other = tuner.choice(SamplingSettings(temperature=0.5))
    assert (other.costs, other.limits) == (first.costs, first.limits)
    assert tuner.choice(SamplingSettings()) is first
    for number in range(2 * MAX_SAMPLINGS):
        tuner.choice(SamplingSettings(temperature=1 + number))
    assert tuner.choice(SamplingSettings()) is not first, "what is long unused is forgotten"


# On the built-in pair

PROMPTS = ["def read_lines(path):\n    ", "import os\n\nclass ", "for index in range(10):\n"]
GREEDY = SamplingSettings()
NUM_TOKENS = 24


def tuned_engine(tree: TreeSettings) -> Engine:
    pair = open_pair(None, None)
    run_config = resolve_run_config(
        pair.target, pair.max_context, draft=pair.draft, dtype="float32", context_tokens=512
    )
    return Engine(set_up(pair, run_config, tree, is_tuned=True), self_check=False)


@pytest.fixture(scope="module", params=["adaptive", "opt-tree", "dyspec", "eagle2", "sequoia", "chain", "mcsd"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with tuned_engine(TreeSettings(policy=request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[Callable[[str, SamplingSettings], tuple[int, ...]]]:
    """What plain decoding writes, each text once."""
    with tuned_engine(TreeSettings(policy="none")) as engine:

        @functools.cache
        def tokens(prompt: str, sampling: SamplingSettings) -> tuple[int, ...]:
            return engine.generate(prompt, max_new_tokens=NUM_TOKENS, sampling=sampling, seed=3).token_ids

        yield tokens


def with_sampling(engine: Engine) -> list[tuple[str, SamplingSettings]]:
    """Prompts at temperatures in turn; texts of sampled trees depend on them above 0."""
    temperatures = (0.8, 0.0, 0.8) if engine.tree.children == "coupled" else (0.0,) * len(PROMPTS)
    return [(prompt, SamplingSettings(temperature=each)) for prompt, each in zip(PROMPTS, temperatures, strict=True)]


def tune_by(engine: Engine, tuning: TuningSettings) -> None:
    """Tune the engine's own trees anew, by these settings."""
    engine.use_tree(None)
    engine.trees._own_tuner = Tuner(engine.tree, engine.largest_tree, tuning=tuning)


def test_texts_are_those_of_plain_decoding(engine: Engine, plain: Callable[..., tuple[int, ...]]) -> None:
    # Trees go on, so that there is something to see.
    tune_by(engine, TuningSettings(min_change=1e9))
    sizes = set()
    for prompt, sampling in with_sampling(engine):
        tuned = engine.generate(prompt, max_new_tokens=NUM_TOKENS, sampling=sampling, seed=3)
        sizes |= {step.num_drafted for step in tuned.passes}
        assert tuned.token_ids == plain(prompt, sampling)
    assert len(sizes) > 1, "nothing was tuned"


def test_texts_are_those_of_plain_decoding_where_it_switches(
    engine: Engine, plain: Callable[..., tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain steps leave tokens pending in the draft, which the next look reads."""
    tune_by(engine, TuningSettings(min_change=0.0, max_wait=3, max_first_wait=3))
    observe = TextTuning.observe
    # A draft call takes as long as a pass, whatever else runs here: a step without trees pays now and then.
    monkeypatch.setattr(
        TextTuning,
        "observe",
        lambda self, cost: observe(self, replace(cost, grow_s=0.1 * (cost.num_layers or 0), target_s=0.1, rest_s=0.0)),
    )
    for prompt, sampling in with_sampling(engine):
        tuned = engine.generate(prompt, max_new_tokens=NUM_TOKENS, sampling=sampling, seed=3)
        assert {0} < {step.num_drafted for step in tuned.passes}
        assert tuned.token_ids == plain(prompt, sampling)


def test_the_next_text_goes_on_where_the_last_one_ended() -> None:
    # Without looked up text, beside which the clock may leave out the draft in all of so few steps.
    with tuned_engine(TreeSettings(lookup=False)) as engine:
        assert engine.trees_in_use(GREEDY) is None
        engine.generate(PROMPTS[0], max_new_tokens=30, sampling=GREEDY)
        words = engine.trees_in_use(GREEDY)
        assert words is not None
        assert "(tuned)" in words
        assert engine.generate(PROMPTS[1], max_new_tokens=1, sampling=GREEDY).passes == ()
        # Its prompt may show that passes have become faster, and so what such trees would yield and take.
        assert str(engine.trees_in_use(GREEDY)).split(" ")[:3] == words.split(" ")[:3]


def test_texts_that_depend_on_their_trees_are_held_to_the_settings() -> None:
    with tuned_engine(TreeSettings(policy="opt-tree", draw="chosen", size=5)) as engine:
        sampling = SamplingSettings(temperature=0.8)
        found = engine.generate(PROMPTS[0], max_new_tokens=30, sampling=sampling, seed=1)
        assert (engine.is_tuned, engine.tunes(sampling), engine.trees_in_use(sampling)) == (True, False, None)
        assert {step.num_drafted for step in found.passes[:-3]} == {5}


def test_trees_that_the_user_gives_are_held_to() -> None:
    with Engine.from_pair(open_pair(None, None), tree=TreeSettings(size=5, lookup=False), self_check=False) as engine:
        found = engine.generate(PROMPTS[0], max_new_tokens=30, sampling=GREEDY)
        assert not engine.is_tuned
        assert {step.num_drafted for step in found.passes[:-3]} == {5}


def test_a_profile_says_what_passes_of_several_texts_take() -> None:
    costs = Tuner(TreeSettings(), TreeSettings(size=256), profile=example_profile())._costs
    assert costs.plain_s(4) == pytest.approx(0.21)
    assert costs.plain_s(1) == pytest.approx(0.201)
