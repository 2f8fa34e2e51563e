"""Before the first tree the sums say whether one may pay: one that cannot is never asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgespec.grow.sequoia import power_law
from edgespec.tuning.costs import GrowthCosts, StepCosts
from edgespec.tuning.draft_facts import DraftFacts, FirstGrowth
from edgespec.tuning.lookup_gain import FIRST_LOOKS, LookupGain
from edgespec.tuning.situation import Situation
from edgespec.tuning.tokens_by_size import MeanTree
from edgespec.tuning.tree_choice import TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from tests.edgespec.tuning.simulated import Machine, Pair, simulate, tokens_per_s
from tests.edgespec.tuning.test_tuner import LIMITS, MACHINES

POOR, GOOD = (0.1, 0.4), (0.45, 0.95)


def first_choice(machine: Machine, *, streams: bool = False) -> TreeChoice:
    """A choice that knows what a small tree of two layers takes, and the pass over the prompt."""
    growth = FirstGrowth(layers=2, nodes=8, seconds=machine.growth_s(2, 8), row_s=machine.layer_s / 50)
    costs = StepCosts(growth=GrowthCosts())
    costs.growth.observe(growth.layers, growth.nodes, growth.seconds)
    costs.passes(1).observe(64, machine.pass_s(64))
    usual = DraftFacts(growth=growth, rates=lambda _temperature: power_law(0.6)).usual_trees(0.0)
    return TreeChoice(costs, LIMITS, start=TreeLimits(8), usual=usual, streams=streams)


CANNOT: dict[str, Callable[[int], float]] = {
    "a draft that is slower than the target": lambda _rows: 0.7,
    "each row as dear as a pass": lambda rows: 0.5 * rows,
}


@pytest.mark.parametrize("pass_s", CANNOT.values(), ids=CANNOT)
def test_a_draft_that_cannot_bring_what_its_call_takes_is_never_asked(pass_s: Callable[[int], float]) -> None:
    machine = Machine(pass_s=pass_s, layer_s=1.0)
    assert not any(step.nodes for step in simulate(first_choice(machine), machine, Pair(), steps=3000))


@pytest.mark.parametrize("first", [POOR, GOOD], ids=["a poor draft", "a good draft"])
@pytest.mark.parametrize("steps", [32, 120, 600])
def test_a_draft_that_is_hardly_worth_it_costs_little_at_any_length(first: tuple[float, float], steps: int) -> None:
    """The built-in pair in memory: a layer takes half a pass."""
    machine = Machine(pass_s=lambda rows: 0.009 + 0.0006 * rows, layer_s=0.0045, node_s=0.0002)
    for seed in range(6):
        found = simulate(first_choice(machine), machine, Pair(first=first, seed=seed), steps=steps)
        assert tokens_per_s(found) > 0.96 / machine.pass_s(1), seed


@pytest.mark.parametrize("machine", [MACHINES[name] for name in ("a slow link", "a flat pass and a free draft")])
def test_where_weights_stream_a_draft_that_pays_grows_from_the_first_step(machine: Machine) -> None:
    (step,) = simulate(first_choice(machine, streams=True), machine, Pair(), steps=1)
    assert step.nodes


def test_in_memory_a_draft_that_pays_grows_after_a_step_of_the_root() -> None:
    machine = MACHINES["weights in memory"]
    first, second = simulate(first_choice(machine), machine, Pair(), steps=2)
    assert not first.nodes
    assert second.nodes


def test_a_draft_that_pays_against_what_is_usual_is_found_in_time() -> None:
    """Its layers take longer than half a pass: hardly a usual draft would pay, and this one is always right."""
    machine = Machine(pass_s=lambda rows: 1.0 + 0.005 * rows, layer_s=0.65, node_s=1e-3)
    choice, pair = first_choice(machine), Pair(first=(0.97, 1.0))
    assert not simulate(choice, machine, pair, steps=8)[-1].nodes
    simulate(choice, machine, pair, steps=600)
    assert not choice.is_plain
    assert tokens_per_s(simulate(choice, machine, pair, steps=100)) > 1.1 / machine.pass_s(1)


def test_what_is_looked_up_counts_for_steps_without_a_draft() -> None:
    gain = LookupGain()
    assert gain.of(1) == 1.0
    for _ in range(200):
        gain.learn(1, tokens=2, added=0.25)
    assert gain.of(1) == pytest.approx(1.6, rel=0.01)
    assert gain.of(5) == 1.0
    for _ in range(1000):  # texts of steps that take a fourth longer by the rows of all
        gain.learn(5, tokens=2, added=0.05)
    assert gain.of(5) == pytest.approx(1.6, rel=0.01)
    machine = MACHINES["weights in memory"]
    choice = first_choice(machine)
    choice.costs.gain = gain
    gain.learn(1, tokens=2000, added=99.0)  # a text that is a copy
    assert not any(step.nodes for step in simulate(choice, machine, Pair(), steps=3))


@pytest.mark.parametrize(("weight", "pays"), [(1.0, True), (0.3, True), (0.2, False), (0.0, False)])
def test_looking_up_pays_in_company_where_its_tokens_bring_the_end_of_all_nearer_than_its_rows_take(
    weight: float, pays: bool
) -> None:
    """A fifth more tokens for a fiftieth more seconds, and a clear gain is three percent."""
    for num_texts in (2, 4, 16):
        gain = LookupGain()
        for number in range(FIRST_LOOKS - 1):
            gain.learn(num_texts, 1 + (number % 5 == 0), added=0.02 / num_texts, weight=weight)
        assert gain.pays(num_texts)  # it was not seen often enough
        for number in range(50 * num_texts):
            gain.learn(num_texts, 1 + (number % 5 == 0), added=0.02 / num_texts, weight=weight)
        assert gain.pays(num_texts) == pays
        assert gain.of(num_texts) == pytest.approx(1.2 / 1.02, rel=0.06)  # to a draft's trees


STREAMED = Machine(pass_s=lambda rows: 1.0 + 1e-4 * rows, layer_s=0.12)


def test_the_first_tree_is_no_deeper_than_the_sums_say() -> None:
    choice = first_choice(STREAMED, streams=True)
    simulate(choice, STREAMED, Pair(), steps=1)
    # What the best of usual trees bring a second, for a layer's seconds
    assert choice.in_step.stop_gain == pytest.approx(0.12 * 3.5 / 1.7 / 0.7, rel=0.3)
    free = first_choice(MACHINES["a flat pass and a free draft"], streams=True)
    simulate(free, MACHINES["a flat pass and a free draft"], Pair(), steps=1)
    assert free.in_step.stop_gain < choice.in_step.stop_gain


def test_where_passes_are_as_long_with_few_rows_no_step_is_spent_on_the_root_alone() -> None:
    """The pass over the prompt has shown it."""
    assert all(step.nodes for step in simulate(first_choice(STREAMED, streams=True), STREAMED, Pair(), steps=6))
    experts = Machine(pass_s=lambda rows: 0.1 + 0.02 * rows, layer_s=0.01)  # each row reads others
    steps = simulate(first_choice(experts, streams=True), experts, Pair(), steps=6)
    assert not all(step.nodes for step in steps)


def first_situation(num_texts: int, *, num_unread: int = 0, growth_s: float = 0.0) -> Situation:
    """Texts that have roots timed, and trees as usual that would make 1.3 times the tokens a second."""
    costs = StepCosts()
    costs.growth.observe(1, 2, growth_s)
    costs.growth.row_s = 0.01
    for rows in (num_texts, 64 * num_texts):
        costs.passes(num_texts).observe(rows, 1.0)
    return Situation(
        costs=costs, num_texts=num_texts, sizes=[2], trees=[], limits=TreeLimits(2), is_plain=True,
        usual=[MeanTree(1.3, 2, 1)], is_tested=False, num_unread=num_unread,
    )  # fmt: skip


def test_trees_of_many_texts_must_promise_more_for_their_costs_were_seen_with_one() -> None:
    assert first_situation(1).expects_trees
    assert first_situation(2).expects_trees
    assert not first_situation(5).expects_trees
    assert not first_situation(16).expects_trees


def test_a_draft_is_taken_to_grow_the_trees_of_many_texts_slower_than_that_of_one() -> None:
    assert first_situation(1, growth_s=0.03).expects_trees
    assert first_situation(2).expects_trees
    assert not first_situation(2, growth_s=0.03).expects_trees


def test_what_the_draft_has_to_read_first_counts() -> None:
    assert first_situation(1, num_unread=64).expects_trees  # for 0.64 s, over the next steps
    assert not first_situation(1, num_unread=640).expects_trees


def test_the_pass_over_a_long_prompt_says_little_of_one_that_waits_for_weights_alone() -> None:
    machine = Machine(pass_s=lambda rows: max(1.0, 0.01 * rows), layer_s=0.3)
    choice = first_choice(machine, streams=True)
    choice.costs._passes.clear()
    choice.costs.passes(1).observe(2000, machine.pass_s(2000))  # twenty times as long as a tree's
    (first,) = simulate(choice, machine, Pair(), steps=1)
    assert not first.nodes


def test_on_a_machine_that_is_busier_than_when_the_draft_was_loaded_trees_end_with_the_sums() -> None:
    """Two trees show that such ones take twice as long: what they bring is not waited for."""
    quiet = Machine(pass_s=lambda rows: 0.0055 + 0.0003 * rows, layer_s=0.0045, node_s=0.0002)
    busy = Machine(pass_s=lambda rows: 2 * quiet.pass_s(rows), layer_s=0.009, node_s=0.0004)
    found = simulate(first_choice(quiet), busy, Pair(first=(0.2, 0.5)), steps=16)
    assert sum(step.nodes > 0 for step in found) == 2


def test_one_short_pass_that_was_a_hiccup_starts_no_tree() -> None:
    machine = Machine(
        pass_s=lambda rows: 0.0015 + 1e-4 * rows, layer_s=0.003, slowness=lambda step: 9.0 - 8.0 * (step > 0)
    )
    assert not any(step.nodes for step in simulate(first_choice(machine), machine, Pair(), steps=100))


@pytest.mark.parametrize(("fastest_s", "expects"), [(0.0098, True), (0.0016, False)])
def test_a_draft_is_as_much_slower_beside_other_programs_as_passes_are(fastest_s: float, expects: bool) -> None:
    """It was timed by itself; most passes are stopped for eight milliseconds, and one was not."""
    now = first_situation(1, growth_s=0.0008)
    now.costs._passes.clear()
    for seconds in (0.0099, fastest_s, 0.0098, 0.0099, 0.0098):
        now.costs.passes(1).observe(1, seconds)
        now.costs.passes(1).observe(64, 0.01)
    assert now.expects_trees == expects
