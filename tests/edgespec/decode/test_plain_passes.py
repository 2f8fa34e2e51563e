"""Plain passes beside trees: which are timed, and what those that were say of other numbers of texts."""

import itertools

import pytest

from edgespec.tuning.calibration import GrownTree
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.step import PassCost, StepResult
from edgespec.tuning.tree_choice import SIZES, TreeChoice
from edgespec.tuning.tree_limits import TreeLimits


def cost_of(num_texts: int, *, nodes: int = 0, prompt_rows: int = 0, seconds: float = 1.0) -> PassCost:
    return PassCost(
        num_texts=num_texts, num_rows=num_texts + nodes, num_prompt_rows=prompt_rows, num_layers=2 if nodes else 0,
        num_drafted=nodes, num_unread=0, grow_s=0.01 if nodes else 0.0, target_s=seconds, rest_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(("num_texts", "tokens", "is_timed"), [(13, 1.2, False), (6, 0.5, True), (6, 3.0, False)])
def test_a_plain_pass_is_timed_where_it_may_be_faster(num_texts: int, tokens: float, is_timed: bool) -> None:
    """Where trees of sixteen texts pay, and passes of fewer take as long, no plain pass is needed to tell."""
    choice, number = TreeChoice(StepCosts(), SIZES, start=TreeLimits(8)), itertools.count()
    choice.calibration.learn = lambda *_: None
    step = StepResult(tokens=(1,), finish=None, num_drafted=1, is_prefill=False, grow_s=0.01, target_s=1.0, rest_s=0.0)

    def trees(texts: int) -> bool:
        """Whether the step has trees, which yield so many tokens more than plain decoding."""
        choice.begin_step(next(number), texts)
        if choice.in_step is None:
            choice.observe(cost_of(texts))
            return False
        choice.observe(cost_of(texts, nodes=8 * texts))
        choice.learn(step, GrownTree([tokens / 8] * 8, [1] * 8, 8, is_typical=True))
        return True

    assert trees(16)
    assert not trees(16), "no plain pass has been timed"
    assert trees(16)
    assert trees(num_texts) != is_timed


def test_a_pass_that_reads_prompts_is_no_plain_one() -> None:
    costs = StepCosts()
    costs.observe(cost_of(4, prompt_rows=100, seconds=9.0))
    costs.observe(cost_of(4, nodes=8, seconds=8.0))
    assert costs.least_plain_s(4) == 0
    costs.observe(cost_of(8, seconds=2.0))
    costs.observe(cost_of(2, seconds=1.2))
    assert [costs.least_plain_s(count) for count in (1, 4, 6, 16)] == pytest.approx([0.6, 1.2, 1.5, 2.0])
