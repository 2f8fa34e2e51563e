"""Which steps the draft grows in beside looked up text: where its nodes may be among the best, and where they pay."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from edgespec.draft.lookup import LookedUp
from edgespec.grow.beam import Beam
from edgespec.grow.merged import Merged
from edgespec.grow.opt_tree import OPT_TREE_RULE
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.tuning.lookup_choice import LookupChoice, LookupLimits, is_filled
from edgespec.tuning.step import PassCost, StepResult

CPU = torch.device("cpu")
DRAFTED = 64  # nodes of a tree of the draft's
GROW_S = 0.001
ONE_MATCH = (LookedUp(-1, 5, 0.7, 1), LookedUp(0, 6, 0.49, 2))
SURE = tuple(LookedUp(layer - 1, 5, 0.99**layer, layer + 1) for layer in range(DRAFTED))
DEAR, FREE = {1: 0.1, 3: 0.1, 65: 0.4}, {1: 0.1, 3: 0.1, 65: 0.1}  # rows and seconds of passes


class Matches:
    """A text in which these tokens followed before."""

    def __init__(self, found: Sequence[LookedUp]) -> None:
        self.found = list(found)

    def candidates(self, most: int, *, depth: int, least: float) -> list[LookedUp]:
        return self.found[:most]


def step_of(tokens: int, *, grow_s: float = GROW_S, target_s: float = 0.1, drafted: int = DRAFTED) -> StepResult:
    """A step in which the draft brought so many tokens."""
    return StepResult(
        tokens=(1,) * (tokens + 1), from_draft=(*(True,) * tokens, False), from_lookup=(False,) * (tokens + 1),
        finish=None, num_drafted=drafted, is_prefill=False, grow_s=grow_s, target_s=target_s, rest_s=0.0,
    )  # fmt: skip


def choice(found: Sequence[LookedUp], seconds_of: Mapping[int, float], *, tokens: int, steps: int = 8) -> LookupChoice:
    """A choice that has seen passes of these rows, and trees of the draft's that brought so many tokens."""
    limits = LookupLimits(most=DRAFTED, is_tuned=False, draw="coupled", device=CPU)
    lookup: Any = Matches(found)
    result = LookupChoice(lookup, StepCosts(), limits, DraftWorth())
    for _ in range(steps):
        for rows, seconds in seconds_of.items():
            cost = PassCost(
                num_texts=1, num_rows=rows, num_prompt_rows=0, num_layers=None, num_drafted=0, num_behind=0,
                grow_s=0.0, target_s=seconds, rest_s=0.0,
            )  # fmt: skip
            result.observe(cost)
        result.has_draft = True
        result.learn(step_of(tokens, target_s=seconds_of[65]))
    return result


def is_drafted(choice: LookupChoice) -> bool:
    """Whether the next tree is the draft's too."""
    beam = Beam(root=1, rule=OPT_TREE_RULE, draw="coupled", size=DRAFTED, depth=8, device=CPU)
    growth = choice.growth(beam, root=1, depth=DRAFTED)
    drafted = growth.drafted if isinstance(growth, Merged) else growth
    assert isinstance(growth, Merged) == bool(choice.lookup.candidates(1, depth=1, least=0))
    assert isinstance(drafted, Beam) == choice.has_draft
    if isinstance(drafted, Beam):
        assert drafted.root == beam.root
        assert list(drafted.rivals) == choice.lookup.candidates(DRAFTED, depth=1, least=0)
    else:
        assert isinstance(drafted, TokenTree)
        assert drafted.num_nodes == 1
    return choice.has_draft


@pytest.mark.parametrize(
    ("found", "seconds_of", "tokens", "expected"),
    [
        (ONE_MATCH, FREE, 2, True),
        (ONE_MATCH, DEAR, 2, False),  # its rows make the pass long
        ((), FREE, 2, True),
        ((), DEAR, 2, False),
        (SURE[:-1], FREE, 8, True),
        (SURE, FREE, 8, False),  # none of its nodes could be among the best
    ],
)
def test_the_draft_grows_where_its_nodes_pay(
    found: Sequence[LookedUp], seconds_of: Mapping[int, float], tokens: int, expected: bool
) -> None:
    assert is_drafted(choice(found, seconds_of, tokens=tokens)) == expected


def test_a_dear_tree_is_worth_many_tokens() -> None:
    assert is_drafted(choice((), DEAR, tokens=8))


def test_nothing_is_judged_before_it_was_seen() -> None:
    assert is_drafted(choice((), DEAR, tokens=0, steps=2))
    # A step without the draft shows first what its rows take.
    only_large = choice((), {65: 0.4}, tokens=8)
    assert not is_drafted(only_large)


def test_a_draft_that_was_left_out_is_tried_again_for_a_small_share_of_the_time() -> None:
    found = choice((), DEAR, tokens=1)
    passed, drafted = 0.0, 0
    for _ in range(2000):
        found.has_draft = False
        if is_drafted(found):
            found.learn(step_of(1, target_s=0.4))
            drafted += 1
            passed += 0.4
        else:
            found.learn(step_of(0))
            passed += 0.1
    assert 0.005 < 0.4 * drafted / passed < 0.06
    # It has become better: it comes back, and stays.
    for _ in range(600):
        found.learn(step_of(40, target_s=0.4) if is_drafted(found) else step_of(0))
    assert all(is_drafted(found) or found.learn(step_of(0)) for _ in range(3))


def test_where_trees_tune_themselves_the_tuner_judges_trees_with_nothing_looked_up() -> None:
    found = choice((), DEAR, tokens=1)
    found._limits = LookupLimits(most=DRAFTED, is_tuned=True, draw="coupled", device=CPU)
    assert is_drafted(found)


@pytest.mark.parametrize(
    ("chances", "parents", "most", "expected"),
    [
        ((0.9, 0.8, 0.7), (-1, 0, 1), 3, True),
        ((0.9, 0.8, 0.7), (-1, 0, 1), 4, False),  # one more has a place
        ((0.6, 0.5, 0.35), (-1, 0, 1), 3, False),  # the root leaves 0.4 to others
        ((0.9, 0.4, 0.3), (-1, 0, 1), 3, False),  # the first one leaves 0.5
        ((0.6, 0.3, 0.25), (-1, 0, -1), 3, False),  # of 0.6 the half is left
        ((0.6, 0.35, 0.35), (-1, 0, -1), 3, True),
    ],
)
def test_a_tree_is_filled_where_no_other_node_could_be_better(
    chances: Sequence[float], parents: Sequence[int], most: int, expected: bool
) -> None:
    found = [LookedUp(parent, 7, chance, 1) for chance, parent in zip(chances, parents, strict=True)]
    assert is_filled(found, most) == expected
