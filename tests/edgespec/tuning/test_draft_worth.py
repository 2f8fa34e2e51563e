"""What a draft's trees bring beside looked up text, against the sums of their definition."""

import dataclasses

import pytest

from edgespec.tuning.draft_worth import LEAST_PROBE_SHARE, DraftWorth
from tests.edgespec.tuning.test_lookup_choice import step_of


def worth_of(*tokens: int) -> DraftWorth:
    """Trees that brought so many tokens each."""
    found = DraftWorth()
    for number in tokens:
        found.learn(step_of(number), is_drafted=True)
    return found


def test_the_gain_is_how_much_further_the_further_one_goes() -> None:
    found = worth_of(1, 3, 1, 3)  # of four: all went 1 far, the half 2 and 3
    assert found.gain([]) == pytest.approx(2.0)
    assert found.gain([1.0, 1.0, 1.0, 1.0]) == 0
    # The draft goes 1 or 3 far, the text 0 or 2, each with a half: 1, 2, 3, 3 are 1.25 more than 0 and 2.
    assert found.gain([0.5, 0.5]) == pytest.approx(1.25)


def test_tokens_that_looked_up_text_alone_had_are_none_of_the_drafts() -> None:
    step = dataclasses.replace(step_of(3), from_lookup=(False, True, False, False))
    found = DraftWorth()
    found.learn(step, is_drafted=True)
    assert found.gain([]) == 1.0


def test_a_tree_pays_where_its_tokens_are_more_than_the_text_makes_in_its_seconds() -> None:
    found = worth_of(*(4,) * 50)  # 5 tokens in 0.101 s
    per_s = 5 / 0.101
    assert found.per_s == pytest.approx(per_s)
    assert found.pays([], 0.99 * 4 / per_s)
    assert not found.pays([], 1.01 * 4 / per_s)
    assert found.pays([0.5], 0.99 * 3.5 / per_s)
    assert not found.pays([0.5], 1.01 * 3.5 / per_s)


def seconds_to_probe(found: DraftWorth, times: float) -> float:
    """Write text without the draft, whose trees would take so many times as long as they bring, until one is tried."""
    seconds = 0.0
    while not found.pays([], times * 4 * 0.1):
        found.learn(step_of(0, grow_s=0.0, target_s=0.1), is_drafted=False)
        seconds += 0.1
    found.learn(step_of(4), is_drafted=True)
    return seconds


def slow_text() -> DraftWorth:
    """A text without the draft, whose trees would bring four tokens where it writes ten a second."""
    found = worth_of(*(4,) * 3)
    for _ in range(200):  # in which the text's rate forgets the trees
        found.learn(step_of(0, grow_s=0.0, target_s=0.1), is_drafted=False)
    return found


def test_trees_that_never_pay_are_tried_ever_more_seldom_until_one_pays() -> None:
    found = slow_text()
    assert found.pays([], 0.01)  # a tree that pays is no probe, and ends those before it
    found.learn(step_of(4), is_drafted=True)
    waits = [seconds_to_probe(found, 2.0) for _ in range(20)]
    assert waits[3] > 2.5 * waits[0]
    assert waits[-1] == pytest.approx(10 * waits[0], rel=0.1)
    assert found.pays([], 0.01)
    found.learn(step_of(4), is_drafted=True)
    assert seconds_to_probe(found, 2.0) == pytest.approx(waits[0], rel=0.1)


def test_trees_that_are_far_from_paying_are_tried_seldom_from_the_first_on() -> None:
    """A bound on what all trials cost: a share of the time in which the text makes the tokens that one loses."""
    found = slow_text()
    found.learn(step_of(4), is_drafted=True)
    waits = [seconds_to_probe(found, 4.0) for _ in range(3)]
    assert waits == pytest.approx([(4.0 - 1) * 4 * 0.1 / LEAST_PROBE_SHARE] * 3, rel=0.1)


def test_a_hiccup_is_no_verdict() -> None:
    found = worth_of(*(4,) * 20)
    usual = found.grow_s
    found.learn(step_of(4, grow_s=60.0, target_s=60.0), is_drafted=True)
    assert found.grow_s < 1.3 * usual
    assert found.per_s > 0.85 * 5 / 0.101


@pytest.mark.parametrize("num_hiccups", [1, 2])
def test_first_trees_that_were_hiccups_leave_the_draft_in(num_hiccups: int) -> None:
    """A draft's first trees also load its kernels; its third one shows what a tree takes."""
    usual = worth_of(*(4,) * 3).grow_s
    found = DraftWorth()
    for number in range(3):
        grow_s = 60.0 if number < num_hiccups else usual
        found.learn(step_of(4, grow_s=grow_s, target_s=0.1), is_drafted=True)
    assert found.is_known
    assert found.grow_s == pytest.approx(usual)
    for _ in range(200):  # in which the text's rate forgets them
        found.learn(step_of(0, grow_s=0.0, target_s=0.1), is_drafted=False)
    assert found.pays([], found.grow_s)
