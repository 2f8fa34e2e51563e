"""Texts that tune themselves share the nodes of a step: no text changes, and yields are those of all trees."""

import random

import pytest

from edgespec.config import SamplingSettings
from edgespec.decode.batch import Batch
from edgespec.decode.loop import decode
from edgespec.decode.sequence import Sequence
from edgespec.tree.settings import TreeSettings
from edgespec.tuning.calibration import GrownTree
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.settings import TuningSettings
from edgespec.tuning.step import StepResult
from edgespec.tuning.tokens_by_size import TokensBySize
from edgespec.tuning.tree_choice import TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from edgespec.tuning.tuner import Tuner
from tests.edgespec.grow.tables import VOCAB, draft_logits, session_of, target_logits

SEED, SIZES = 3, [1, 2, 4, 8]


def text_of(number: int, policy: str, tuner: Tuner | None) -> tuple[Sequence, list[int]]:
    """A text of its own likeness to its draft: some trees are worth far more than others."""
    rng = random.Random(number)
    sequence = session_of(
        TreeSettings(policy=policy, size=24) if tuner else TreeSettings(policy="none"),
        SamplingSettings(temperature=rng.choice([0.0, 0.9])),
        target=target_logits(SEED),
        draft=draft_logits(SEED, likeness=rng.choice([0.2, 1.0])),
        max_new_tokens=rng.randint(10, 30),
        seed=number,
        key=number,
        tuner=tuner,
    )
    return sequence, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]


@pytest.mark.parametrize("policy", ["adaptive", "opt-tree", "eagle2", "c2t"])
def test_texts_that_share_a_budget_are_those_of_plain_decoding(policy: str) -> None:
    largest_tree = TreeSettings(policy=policy, size=24)
    tuner, batch = Tuner(largest_tree, largest_tree, first_size=4, tuning=TuningSettings(min_change=1e9)), Batch()
    numbers: dict[Sequence, int] = {}
    for number in range(8):
        sequence, prompt = text_of(number, policy, tuner)
        batch.enter(sequence, prompt)
        numbers[sequence] = number
    found, has_more, has_less = [list[int]() for _ in numbers], False, False
    while batch.sequences:
        outcomes = batch.step()
        limits = {sequence.settings.sampling: tuner.choice(sequence.settings.sampling).in_step for sequence in numbers}
        budget = num_nodes = 0
        for outcome in outcomes:
            found[numbers[outcome.sequence]] += outcome.step.tokens
            wanted = limits[outcome.sequence.settings.sampling]
            if not outcome.step.is_prefill and wanted is not None:
                budget, num_nodes = budget + wanted.size, num_nodes + outcome.step.num_drafted
                has_more |= outcome.step.num_drafted > wanted.size
                has_less |= outcome.step.num_drafted < wanted.size
        assert num_nodes <= budget
    assert has_more
    assert has_less
    for number, tokens in enumerate(found):
        sequence, prompt = text_of(number, policy, None)
        assert tokens == [token for step in decode(sequence, prompt) for token in step.tokens]


def test_of_several_trees_a_size_is_the_mean_of_the_best_nodes_of_all() -> None:
    yields = TokensBySize(SIZES)
    expected, layers = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], [1, 1, 2, 2, 3, 1, 4, 5]
    yields.learn(expected, layers, 4, 2)
    found = yields.all()
    for size, of_size in zip(SIZES[:3], found, strict=False):
        assert of_size.tokens == pytest.approx(1 + sum(expected[: 2 * size]) / 2)
        assert (of_size.nodes, of_size.layers) == (size, max(layers[: 2 * size])), "a layer is a call for all of them"
    assert yields.num_trees == 2


def test_of_one_tree_a_time_they_are_running_means() -> None:
    yields = TokensBySize(SIZES)
    for tokens in (0.2, 0.4):
        yields.learn([tokens] * 8, [1] * 8, 8)
    assert yields.all()[2].tokens == pytest.approx(1 + 4 * 0.3)


@pytest.mark.parametrize(("shares_budget", "tokens"), [(True, 1 + (0.9 + 0.8) / 2), (False, 1 + (0.9 + 0.1) / 2)])
def test_trees_of_a_step_are_looked_at_together_where_they_share_a_budget(shares_budget: bool, tokens: float) -> None:
    """Of two texts, one is sure: of both, its two nodes are the best."""
    choice = TreeChoice(StepCosts(), SIZES, start=TreeLimits(2), shares_budget=shares_budget)
    choice.costs.passes(2).observe(6, 1.0)
    choice.begin_step(0, 2)
    step = StepResult(tokens=(1,), finish=None, num_drafted=2, is_prefill=False, grow_s=0.1, target_s=1.0, rest_s=0.0)
    choice.calibration.learn = lambda *_: None
    for scores in ([0.9, 0.8], [0.1, 0.05]):
        choice.learn(step, GrownTree(scores, [1, 2], 2, is_typical=True))
    choice.begin_step(1, 2)
    assert choice.yields.all()[0].tokens == pytest.approx(tokens)
