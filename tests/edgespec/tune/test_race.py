"""The rule of a race, on numbers that are known: who stays, when it is decided, who has won."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.tune.race import (
    Rule,
    Speeds,
    by_prompt,
    clearly_faster,
    is_decided,
    log_speeds,
    still_racing,
    unseen_share,
    winner,
)
from profiles.cost import Floats

RULE = Rule(confidence=0.95, least_gain=0.02)


def speeds(*per_s: float) -> Speeds:
    """Of contenders that are that fast at every one of eight prompts."""
    return log_speeds(np.ones((8, len(per_s))), np.ones((8, len(per_s))) / np.array(per_s), RULE)


def prompts_that_differ(gain: float, *, count: int = 12) -> tuple[Floats, Floats]:
    """One contender is faster by `gain` at each prompt; a prompt yields between one token and six a second."""
    tokens = np.repeat(np.linspace(1, 6, count)[:, None], 2, axis=1)
    return tokens, np.stack([np.ones(count), np.full(count, 1 + gain)], axis=1)


def test_differences_are_taken_within_prompts() -> None:
    """Prompts differ by six times, the contenders by a tenth: unpaired, that would be nothing."""
    tokens, seconds = prompts_that_differ(0.1)
    assert still_racing(log_speeds(tokens, seconds, RULE), RULE).tolist() == [0]
    assert still_racing(log_speeds(tokens, np.stack([seconds[:, 0], seconds[::-1, 1] * tokens[::-1, 1] / tokens[:, 1]],
                                                     axis=1), RULE), RULE).tolist() == [0, 1]  # fmt: skip


def test_tokens_and_seconds_of_a_resample_are_those_of_the_same_prompts() -> None:
    """Both yield what they take time for; the first is faster by a tenth wherever it is."""
    tokens = np.linspace(1, 6, 12)[:, None] * [1.0, 1.0]
    assert still_racing(log_speeds(tokens, tokens * [1.0, 1.1], RULE), RULE).tolist() == [0]
    other = np.stack([tokens[:, 0], np.ones(12)], axis=1)
    assert still_racing(log_speeds(other, other * [1.0, 1.1], RULE), RULE).tolist() == [0]


def test_steps_behind_one_prompt_are_one_piece_of_luck() -> None:
    """A hundred steps behind each of three prompts, at one of which the second contender is lucky."""
    rows = np.repeat([[1.0, 1.0], [1.0, 1.0], [1.0, 1.6]], 100, axis=0)
    prompts = np.repeat([0, 1, 2], 100).tolist()
    seconds = np.ones_like(rows)
    by_steps = log_speeds(rows, seconds, RULE)
    assert still_racing(by_steps, RULE).tolist() == [1], "had each step been a prompt of its own"
    found = log_speeds(by_prompt(rows, prompts), by_prompt(seconds, prompts), RULE)
    assert still_racing(found, RULE).tolist() == [0, 1]


def test_clearly_faster_is_who_is_so_at_most_prompts_and_not_who_was_lucky_at_one() -> None:
    assert clearly_faster(speeds(1.0, 1.01, 1.03), 0, RULE).tolist() == [2]  # the least gain is two percent
    lucky = log_speeds(np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.6]]), np.ones((3, 2)), RULE)
    assert clearly_faster(lucky, 0, RULE).tolist() == []
    assert clearly_faster(log_speeds(np.array([[1.0, 2.0]]), np.ones((1, 2)), RULE), 0, RULE).tolist() == []


def test_rows_are_added_up_by_prompt_in_any_order() -> None:
    assert by_prompt(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), [7, 2, 7]).tolist() == [[3, 4], [6, 8]]


def test_a_speed_is_all_tokens_over_all_seconds() -> None:
    """Slow prompts take most of the time: the mean of the prompts' speeds is another number."""
    found = log_speeds(np.array([[1.0], [4.0]]), np.array([[1.0], [1.0]]), RULE)
    assert found.measured.tolist() == pytest.approx([np.log(2.5)])


def test_who_is_behind_by_more_than_the_least_gain_is_dropped() -> None:
    found = speeds(1.0, 0.985, 0.97, 0.5)
    assert still_racing(found, RULE).tolist() == [0, 1]
    assert still_racing(found, Rule(confidence=0.95, least_gain=0.1)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_best_is_seldom_dropped_however_few_the_prompts(count: int) -> None:
    """It is better by the least gain; at each prompt there is noise of a tenth.

    Resamples that are not stretched drop it several times as often at two prompts.
    """
    luck = np.random.default_rng(count)
    rule = Rule(confidence=0.9, least_gain=0.0)
    lost = 0
    for _ in range(300):
        seconds = np.exp(luck.normal((0.0, 0.01), 0.1, (count, 2)))
        lost += 0 not in still_racing(log_speeds(np.ones_like(seconds), seconds, rule), rule)
    assert lost / 300 < 0.12


def test_one_prompt_drops_nobody_and_decides_nothing() -> None:
    found = log_speeds(np.ones((1, 2)), np.array([[1.0, 9.0]]), RULE)
    assert still_racing(found, RULE).tolist() == [0, 1]
    assert not is_decided(found, RULE)


def test_a_race_is_decided_when_all_are_surely_as_fast_or_one_is_left() -> None:
    assert is_decided(speeds(1.0), RULE)
    assert is_decided(speeds(1.0, 0.99), RULE)
    assert not is_decided(speeds(1.0, 0.96), RULE)
    noisy = np.exp(0.1 * np.random.default_rng(0).normal(size=(8, 2)))
    noisy /= noisy.mean(0)  # alike, as it happens
    assert not is_decided(log_speeds(np.ones((8, 2)), noisy, RULE), RULE)


@pytest.mark.parametrize(
    ("per_s", "nodes", "won"),
    [
        ((1.0, 0.99), (16.0, 2.0), 1),  # fewer nodes, as fast but for the least gain
        ((1.0, 0.97), (16.0, 2.0), 0),  # fewer nodes, slower
        ((0.99, 1.0), (16.0, 2.0), 1),
        ((1.0, 0.99, 0.985), (16.0, 2.0, 0.0), 2),  # plain decoding
        ((0.99, 1.0), (2.0, 2.0), 1),  # of as many nodes the faster one
    ],
)
def test_the_winner_is_the_leader_or_has_fewer_nodes_and_gives_up_little(
    per_s: tuple[float, ...], nodes: tuple[float, ...], won: int
) -> None:
    assert winner(speeds(*per_s), nodes, RULE) == won


def test_the_luckiest_of_many_is_promised_what_it_yields_where_it_was_not_chosen() -> None:
    """Forty contenders that are all the same: their best speed at six prompts is luck, and none of it lasts."""
    luck = np.random.default_rng(3).uniform(1, 6, size=(6, 40))
    seemed = (luck.sum(0) / 6).max()
    assert luck.mean() < 0.8 * seemed
    assert unseen_share(luck, np.ones_like(luck)) * seemed == pytest.approx(luck.mean(), rel=0.15)


def test_one_that_is_faster_everywhere_keeps_its_promise() -> None:
    tokens, seconds = prompts_that_differ(0.1)
    assert unseen_share(tokens, seconds) == pytest.approx(1)
    assert unseen_share(tokens[:1], seconds[:1]) == 1
