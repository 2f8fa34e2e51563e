"""Looked up text has a price in company: on a simulated machine it hardly makes texts slower than roots alone.

Texts repeat themselves here and there; seconds are those of a line over a pass's rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from edgespec.draft.lookup import TextLookup
from edgespec.grow.merged import Merged, merged
from edgespec.tree.token_tree import TokenTree, root_only
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.tuning.lookup_choice import LookupChoice, LookupLimits, shares_of_end
from edgespec.tuning.step import PassCost, StepResult

CPU = torch.device("cpu")
PROMPT, NEW = 64, 48
MEMORY = {  # seconds of a pass by its rows: where each row adds, and where weights are waited for
    "a small target": lambda rows: 0.0035 + 0.0003 * rows,
    "a target in memory": lambda rows: 0.0081 + 0.0006 * min(rows, 16) + 0.0003 * max(0, rows - 16),
}


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated machine looks up in no time."""
    monkeypatch.setattr("edgespec.tuning.lookup_choice.time.perf_counter", lambda: 0.0)


def texts(count: int, seed: int) -> list[list[int]]:
    """Tokens at random, but for passages that stood there before; one text in four repeats a lot."""
    draw, found = random.Random(seed), []
    for number in range(count):
        ids = [draw.randrange(200) for _ in range(PROMPT // 2)]
        while len(ids) < PROMPT + NEW + 1:
            if draw.random() < (0.6 if number % 4 == 0 else 0.12):
                start = draw.randrange(len(ids) - 4)
                ids += ids[start : start + draw.randrange(4, 12)]
            else:
                ids.append(draw.randrange(200))
        found.append(ids[: PROMPT + NEW + 1])
    return found


@dataclass(slots=True)
class Running:
    """A text and how far it is."""

    ids: Sequence[int]
    choice: LookupChoice
    at: int = PROMPT

    @property
    def left(self) -> int:
        return len(self.ids) - 1 - self.at

    def tree(self) -> TokenTree:
        growth = self.choice.growth(root_only(self.ids[self.at], draw="coupled", device=CPU), 0, depth=self.left - 1)
        if isinstance(growth, Merged):
            assert isinstance(growth.drafted, TokenTree)
            return merged(growth.drafted, growth.looked_up, growth.num_to_take)
        assert isinstance(growth, TokenTree)
        return growth

    def take(self, tree: TokenTree) -> tuple[int, ...]:
        """Go down the tree, and return the tokens."""
        parents, tokens, node, path = tree.parents.tolist(), tree.tokens.tolist(), 0, 0
        while True:
            wanted = self.ids[self.at + path + 1]
            below = [n for n in range(1, len(parents)) if parents[n] == node and tokens[n] == wanted]
            path += 1
            if not below or path == self.left:
                break
            node = below[0]
        gained = tuple(self.ids[self.at + 1 : self.at + path + 1])
        self.choice.lookup.add(gained)
        self.at += path
        return gained


def seconds_of(pass_s: Callable[[int], float], all_ids: Sequence[Sequence[int]]) -> float:
    """The seconds until all texts are written, of which the pass over the prompts is none."""
    costs, worth = StepCosts(), DraftWorth()
    limits = LookupLimits(most=64, is_tuned=True, draw="coupled", device=CPU)
    running = [Running(ids, LookupChoice(TextLookup(), costs, limits, worth)) for ids in all_ids]
    for text in running:
        text.choice.lookup.begin(list(text.ids[: PROMPT + 1]))
    rows = PROMPT * len(running)
    costs.observe(cost(num_texts=len(running), num_prompt_rows=rows, seconds=pass_s(rows)))
    passed = 0.0
    for number in itertools.count():
        if not running:
            return passed
        for text, share in zip(running, shares_of_end([text.left for text in running]), strict=True):
            text.choice.begin_step(number, len(running), share)
        trees = [text.tree() for text in running]
        rows = sum(tree.num_nodes for tree in trees)
        step_s = pass_s(rows)
        passed += step_s
        costs.observe(cost(num_texts=len(running), num_rows=rows, seconds=step_s))
        for text, tree in zip(running, trees, strict=True):
            text.choice.learn(
                StepResult(
                    tokens=text.take(tree), finish=None, num_drafted=tree.num_nodes - 1, is_prefill=False,
                    num_texts=len(running), grow_s=0.0, target_s=step_s, rest_s=0.0,
                )
            )  # fmt: skip
        running = [text for text in running if text.left]
    raise AssertionError


def cost(*, num_texts: int, seconds: float, num_rows: int = 0, num_prompt_rows: int = 0) -> PassCost:
    return PassCost(
        num_texts=num_texts, num_rows=num_rows, num_prompt_rows=num_prompt_rows, num_layers=None, num_drafted=0,
        num_unread=0, grow_s=0.0, target_s=seconds, rest_s=0.0,
    )  # fmt: skip


def times_as_fast(pass_s: Callable[[int], float], num_texts: int) -> float:
    """The speed with looked up text over that of roots alone, over some groups of texts."""
    groups = [texts(num_texts, seed) for seed in range(3)]
    return len(groups) * NEW * pass_s(num_texts) / sum(seconds_of(pass_s, ids) for ids in groups)


@pytest.mark.parametrize("pass_s", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize(("num_texts", "least"), [(5, 1.1), (16, 0.999)])
def test_where_rows_cost_texts_in_company_are_no_slower(
    pass_s: Callable[[int], float], num_texts: int, least: float
) -> None:
    """Of sixteen texts one is without luck to the end, and the others' tokens gain nothing."""
    assert times_as_fast(pass_s, num_texts) > least


def test_the_first_look_of_texts_in_company_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's rows need no probabilities, and say that rows are nearly free until a step has shown more."""
    monkeypatch.setitem(globals(), "NEW", 32)

    def pass_s(rows: int) -> float:
        return 0.133 if rows == 16 * PROMPT else 0.0104 + 0.00037 * rows

    assert times_as_fast(pass_s, 16) > 0.998


def test_where_rows_are_free_it_loses_nothing() -> None:
    assert times_as_fast(lambda rows: 0.3 + 0.0005 * rows, 5) > 1.4


def test_a_text_alone_gains() -> None:
    assert times_as_fast(MEMORY["a target in memory"], 1) > 1.2


def test_texts_that_are_behind_have_the_larger_share_in_the_end() -> None:
    assert shares_of_end([7]) == [1.0]
    behind, ahead = shares_of_end([60, 30])
    assert behind > 50 * ahead
    near, nearer = shares_of_end([400, 396])  # a lead that chance may take again
    assert near > nearer > near / 2
    assert sum(shares_of_end([9] * 16)) < sum(shares_of_end([9] * 2)) < 1.0, "the last text gains less than the mean"


def test_a_pass_over_prompts_says_what_rows_cost_before_the_first_tree() -> None:
    """Of one size of passes alone, rows would seem free."""
    found = 20 * [7, 8, 9]
    limits = LookupLimits(most=64, is_tuned=True, draw="coupled", device=CPU)
    costs = StepCosts()
    choice = LookupChoice(TextLookup(), costs, limits, DraftWorth())
    choice.lookup.begin(found)
    choice.begin_step(0, 1, 1.0)
    costs.observe(cost(num_texts=1, num_rows=1, seconds=0.01))
    assert isinstance(choice.growth(root_only(9, draw="coupled", device=CPU), 9, depth=60), Merged)
    costs.observe(cost(num_texts=1, num_prompt_rows=64, seconds=0.64))  # each row as dear as a pass
    assert isinstance(choice.growth(root_only(9, draw="coupled", device=CPU), 9, depth=60), TokenTree)
