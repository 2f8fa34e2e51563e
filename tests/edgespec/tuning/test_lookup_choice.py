"""Which steps the draft grows in beside looked up text: where its nodes may be among the best, and where they pay."""

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from edgespec.draft.lookup import LookedUp
from edgespec.grow.beam import Beam
from edgespec.grow.merged import Merged
from edgespec.grow.opt_tree import OPT_TREE_RULE
from edgespec.grow.sequoia import power_law
from edgespec.tree.token_tree import TokenTree, root_only
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.draft_facts import DraftFacts, FirstGrowth
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.tuning.lookup_choice import LookupChoice, LookupLimits, is_filled
from edgespec.tuning.lookup_gain import FIRST_LOOKS
from edgespec.tuning.step import PassCost, StepResult

CPU = torch.device("cpu")
DRAFTED = 64  # nodes of a tree of the draft's
GROW_S = 0.001
ONE_MATCH = (LookedUp(-1, 5, 0.7, 1), LookedUp(0, 6, 0.49, 2))
SURE = tuple(LookedUp(layer - 1, 5, 0.99**layer, layer + 1) for layer in range(DRAFTED))
DEAR, FREE = {1: 0.1, 3: 0.1, 65: 0.4}, {1: 0.1, 3: 0.1, 65: 0.1}  # rows and seconds of passes


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that take no time."""
    monkeypatch.setattr("edgespec.tuning.lookup_choice.time.perf_counter", lambda: 0.0)


class Matches:
    """A text in which these tokens followed before."""

    def __init__(self, found: Sequence[LookedUp]) -> None:
        self.found, self.stood_before = list(found), True

    def repeats(self) -> bool:
        return self.stood_before

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
                num_texts=1, num_rows=rows, num_prompt_rows=0, num_layers=None, num_drafted=0, num_unread=0,
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
    assert not is_drafted(choice((), {65: 0.4}, tokens=8))


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


def gain_of(found: Sequence[LookedUp], tokens: Sequence[int], *, drafted: bool) -> float:
    """What looked up text alone is said to bring, by a step that gained these tokens."""
    limits = LookupLimits(most=DRAFTED, is_tuned=True, draw="coupled", device=CPU)
    lookup: Any = Matches(found)
    costs = StepCosts()
    costs.passes(1).observe(1, 0.1)
    costs.passes(1).observe(64, 0.1)
    result = LookupChoice(lookup, costs, limits, DraftWorth())
    beam = Beam(root=1, rule=OPT_TREE_RULE, draw="coupled", size=DRAFTED, depth=8, device=CPU)
    result.growth(beam if drafted else root_only(1, draw="coupled", device=CPU), root=1, depth=DRAFTED)
    assert result.has_draft == drafted
    result.learn(dataclasses.replace(step_of(len(tokens) - 1, grow_s=0.0), tokens=tuple(tokens)))
    assert costs.gain.of(1) == costs.gain_left.of(1)
    return costs.gain.of(1)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.usefixtures("no_clock")
def test_each_step_shows_what_looked_up_text_alone_would_bring(drafted: bool) -> None:
    """Beside a draft's tree as well: it has to bring more than that, and not more than roots alone."""
    fork = (*ONE_MATCH, LookedUp(-1, 7, 0.2, 1), LookedUp(2, 6, 0.1, 2))
    none, one, two = (gain_of(fork, tokens, drafted=drafted) for tokens in ([9, 5], [5, 9], [5, 6, 9]))
    assert none == pytest.approx(1.0)
    assert two - 1 == pytest.approx(2 * (one - 1), rel=0.05)
    assert gain_of(fork, [7, 6, 9], drafted=drafted) == two
    assert gain_of(fork, [6, 5, 9], drafted=drafted) == none
    assert gain_of((), [5, 6, 9], drafted=drafted) == none


def test_a_draft_as_usual_is_left_out_of_a_texts_first_steps_where_looked_up_text_is_as_good() -> None:
    growth = FirstGrowth(layers=2, nodes=8, seconds=0.03, row_s=0.0)
    worth = DraftFacts(growth=growth, rates=lambda _temperature: power_law(0.6)).first_worth(0.0)
    assert worth.is_known
    assert worth.gain(()) == pytest.approx(1.49, abs=0.01)  # of eight nodes in two layers
    sure = tuple(LookedUp(layer - 1, 5, 0.9**layer, layer + 1) for layer in range(4))
    for found, expected in ((sure, False), ((), True), ((LookedUp(-1, 5, 0.1, 1),), True)):
        limits = LookupLimits(most=DRAFTED, is_tuned=True, draw="coupled", device=CPU)
        lookup: Any = Matches(found)
        costs = StepCosts()
        costs.passes(1).observe(64, 0.1)  # over the prompt, while weights stream
        costs.passes(1).observe(1, 0.1)
        choice = LookupChoice(lookup, costs, limits, copy.copy(worth))
        beam = Beam(root=1, rule=OPT_TREE_RULE, draw="coupled", size=DRAFTED, depth=8, device=CPU)
        choice.growth(beam, root=1, depth=DRAFTED)
        assert choice.has_draft == expected
    assert not DraftFacts().first_worth(0.0).is_known


class Company:
    """One of five texts that look up together; the tokens that it gains are given."""

    def __init__(self, *, streams: bool = False, prompts_s: float = 0.1) -> None:
        """By the pass over the prompts rows cost nothing, unless that took longer than a step of roots."""
        limits = LookupLimits(most=DRAFTED, is_tuned=True, draw="coupled", device=CPU, streams=streams)
        self.lookup: Any = Matches(ONE_MATCH)
        self.costs = StepCosts()
        self.costs.passes(5).observe(320, prompts_s)
        self.choice = LookupChoice(self.lookup, self.costs, limits, DraftWorth())
        self.numbers = itertools.count()
        self.tokens: list[int] = []

    def looks_up(self, *tokens: int) -> bool:
        """Whether what was looked up is in the step's tree; its text gains these tokens, in this step or one a step."""
        self.choice.begin_step(next(self.numbers), 5, 0.2)
        root = root_only(1, draw="coupled", device=CPU)
        found = isinstance(self.choice.growth(root, root=1, depth=DRAFTED), Merged)
        self.tokens = self.tokens or list(tokens)
        gained = tuple(self.tokens) if found else tuple(self.tokens[:1])
        self.tokens = [] if found else self.tokens[1:]
        self.choice.learn(dataclasses.replace(step_of(0, grow_s=0.0), tokens=gained))
        return found

    @property
    def num_looks(self) -> int:
        return self.costs.gain._known[3].num_looks


def test_a_text_alone_for_which_it_does_not_pay_looks_up_what_follows_tokens_that_stood_before() -> None:
    limits = LookupLimits(most=DRAFTED, is_tuned=True, draw="coupled", device=CPU)
    lookup: Any = Matches(ONE_MATCH)
    costs = StepCosts()
    choice = LookupChoice(lookup, costs, limits, DraftWorth())
    root = root_only(1, draw="coupled", device=CPU)

    def looks_up(number: int, *tokens: int) -> bool:
        costs.passes(1).observe(1, 0.01)
        costs.passes(1).observe(3, 0.011)
        choice.begin_step(number, 1, 1.0)
        found = isinstance(choice.growth(root, root=1, depth=DRAFTED), Merged)
        choice.learn(dataclasses.replace(step_of(0, grow_s=0.0), tokens=tokens))
        return found

    lookup.stood_before = False
    assert [looks_up(number, 9) for number in range(100)] == FIRST_LOOKS * [True] + (100 - FIRST_LOOKS) * [False]
    assert choice.is_idle, "the next steps need not ask"
    lookup.stood_before = True
    assert all(looks_up(number, 5, 6, 9) for number in range(100, 120))
    lookup.stood_before = False
    assert looks_up(120, 9), "it pays again"


def test_what_looking_up_takes_is_a_part_of_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in twenty more pays for looks that take a hundredth of a pass, and not for those that take a tenth."""
    for look_s, expected in ((0.0001, True), (0.001, False)):
        clock = itertools.count(step=look_s)
        monkeypatch.setattr("edgespec.tuning.lookup_choice.time.perf_counter", lambda clock=clock: next(clock))
        limits = LookupLimits(most=DRAFTED, is_tuned=True, draw="coupled", device=CPU)
        lookup: Any = Matches(ONE_MATCH)
        costs = StepCosts()
        costs.passes(1).observe(1, 0.01)
        costs.passes(1).observe(3, 0.01)
        choice = LookupChoice(lookup, costs, limits, DraftWorth())
        for number in range(200):
            choice.begin_step(number, 1, 1.0)
            choice.growth(root_only(1, draw="coupled", device=CPU), root=1, depth=DRAFTED)
            tokens = (5, 6, 9) if number % 40 == 0 else (9,)
            choice.learn(dataclasses.replace(step_of(0, grow_s=0.0), tokens=tokens))
        assert costs.gain.pays(1) == expected


def test_texts_that_do_not_repeat_themselves_are_seen_to_without_being_read() -> None:
    text = Company()
    text.costs.passes(5).observe(5, 0.1)
    for _ in range(FIRST_LOOKS):
        text.looks_up(9)
    text.lookup.stood_before, text.lookup.found, before = False, None, text.num_looks
    assert not any(text.looks_up(9) for _ in range(200))
    assert text.num_looks == before + 4, "as many as of texts that are read"


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("prompts_s", "has_rows"), [(0.1, True), (2.0, False)])
def test_several_texts_look_up_where_rows_cost_little_and_leave_it_where_it_does_not_pay(
    streams: bool, prompts_s: float, has_rows: bool
) -> None:
    text = Company(streams=streams, prompts_s=prompts_s)
    assert text.looks_up(9) == streams  # while weights stream, rows do cost little
    text.costs.passes(5).observe(5, 0.1)
    rows = sum(text.looks_up(9) for _ in range(FIRST_LOOKS))
    assert rows == (FIRST_LOOKS - streams if has_rows or streams else 0), "else the first looks have no rows"
    # What would come of it is seen ever more seldom, by tokens that come without its rows.
    seen, before = [], text.num_looks
    for step in range(1, 200):
        assert not text.looks_up(9)
        if text.num_looks > before:
            seen.append(step + streams)
        before = text.num_looks
    assert seen == [16, 48, 112, 176]


def test_several_texts_that_copy_have_rows_after_the_first_looks_showed_it() -> None:
    text = Company(prompts_s=2.0)
    text.costs.passes(5).observe(5, 0.1)
    rows = [text.looks_up(5, 6, 9) for _ in range(8 * FIRST_LOOKS)]
    first = rows.index(True)
    assert FIRST_LOOKS < first < 4 * FIRST_LOOKS, "a look is over when its last token has come"
    assert all(rows[first:])


def test_several_texts_that_begin_to_copy_are_seen_to_without_a_row_and_look_up_again() -> None:
    text = Company()
    text.costs.passes(5).observe(5, 0.1)
    for _ in range(FIRST_LOOKS):
        text.looks_up(9)
        text.costs.passes(5).observe(8, 0.1)
    rows = [text.looks_up(5, 6, 9) for _ in range(400)]
    first = rows.index(True)
    assert 16 < first < 130
    assert all(rows[first:])
    assert text.costs.gain.of(5) > 1.7


@pytest.mark.parametrize("found", [SURE, ONE_MATCH, ()])
def test_a_draft_is_weighed_against_the_steps_that_looked_up_text_leaves_to_it(found: Sequence[LookedUp]) -> None:
    """Passages that are copied go on without it, however many there are; between them its trees may pay."""
    limits = LookupLimits(most=DRAFTED, is_tuned=True, draw="coupled", device=CPU)
    lookup: Any = Matches(found)
    costs = StepCosts()
    for rows in (1, 64):
        costs.passes(1).observe(rows, 0.1)
    choice = LookupChoice(lookup, costs, limits, DraftWorth())
    tokens = tuple(one.token for one in found)
    for _ in range(20):
        choice.growth(root_only(1, draw="coupled", device=CPU), root=1, depth=DRAFTED)
        choice.learn(dataclasses.replace(step_of(len(tokens), grow_s=0.0), tokens=(*tokens, 9)))
    is_filled = found is SURE
    assert (costs.gain.of(1) > 1.5) == bool(found)
    assert costs.gain_left.of(1) == (1.0 if is_filled else costs.gain.of(1))
