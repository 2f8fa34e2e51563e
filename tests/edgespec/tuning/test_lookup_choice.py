"""Whether looked up text is enough without the draft, by what a pass takes with the rows of both."""

from typing import Any

import pytest
import torch

from edgespec.draft.lookup import LookedUp
from edgespec.grow.growing import GrowthAlone
from edgespec.grow.merged import Merged
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.lookup_choice import LookupChoice, LookupLimits
from edgespec.tuning.step import PassCost, StepResult

DRAFTED = 64  # nodes of a tree of the draft's
GROW_S = 0.001


class OneMatch:
    """A text in which two tokens followed before, with this chance each."""

    def candidates(self, most: int, *, depth: int, least: float) -> list[LookedUp]:
        first = LookedUp(token=5, parent=-1, layer=1, chance=0.7)
        return [first, LookedUp(token=6, parent=0, layer=2, chance=0.49)]


class Growing:
    """A tree that the draft would grow."""


def choice(seconds_of: dict[int, float], *, tokens: int) -> LookupChoice:
    """A choice that has seen passes of these rows, and trees of the draft's that brought so many tokens."""
    costs = StepCosts()
    limits = LookupLimits(most=DRAFTED, is_tuned=False, draw="coupled", device=torch.device("cpu"))
    lookup: Any = OneMatch()
    found = LookupChoice(lookup, costs, limits)
    for _ in range(8):
        for rows, seconds in seconds_of.items():
            cost = PassCost(
                num_texts=1, num_rows=rows, num_prompt_rows=0, num_layers=None, num_drafted=0, num_behind=0,
                grow_s=0.0, target_s=seconds, rest_s=0.0,
            )  # fmt: skip
            found.observe(cost)
        found.has_draft = True
        step = StepResult(
            tokens=(1,) * (tokens + 1), from_draft=(*(True,) * tokens, False), from_lookup=(False,) * (tokens + 1),
            finish=None, num_drafted=DRAFTED, is_prefill=False, grow_s=GROW_S, target_s=0.1, rest_s=0.0,
        )  # fmt: skip
        found.learn(step)
    return found


@pytest.mark.parametrize(
    ("seconds_of", "is_drafted"),
    [({1: 0.1, 3: 0.1, 65: 0.1}, True), ({1: 0.1, 3: 0.1, 65: 0.4}, False)],
    ids=["rows cost nothing", "rows of the draft make the pass long"],
)
def test_the_drafts_rows_are_part_of_what_it_costs(seconds_of: dict[int, float], is_drafted: bool) -> None:
    found = choice(seconds_of, tokens=3)
    drafted: Any = Growing()
    growth = found.growth(drafted, root=1, depth=8)
    assert isinstance(growth, Merged)
    assert found.has_draft == is_drafted
    assert (growth.drafted is drafted) == is_drafted
    assert is_drafted or isinstance(growth.drafted, TokenTree | GrowthAlone)
