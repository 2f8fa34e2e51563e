"""Which nodes of looked up text pay, and in which steps the draft grows beside them.

Only texts that do not depend on their trees have looked up nodes, so that seconds may decide. What follows the end of a
text is sure at one step and unknown at the next, and chances say which: the choice is made for each step by itself.
The draft is left out where looked up nodes fill the tree and none of its could be among the best, and where its tree
does not pay (`draft_worth.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from edgespec.draft import Path
from edgespec.draft.lookup import Corpus, LookedUp, TextLookup
from edgespec.grow import Growth
from edgespec.grow.beam import Beam
from edgespec.grow.merged import Merged
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import TokenTree, root_only
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.tuning.lookup_gain import Look
from edgespec.tuning.step import PassCost, StepResult

LEAST_CHANCE = 0.05  # of a node: below, it costs more to find than it brings
ASKED = 4  # steps without a draft, of which one says what it would be worth
STEP = 4  # nodes between two numbers of them that are compared
SURE_LOSS = 0.7  # of the chance at which a node pays: below, none is looked for
CHEAP = 0.05  # of a text's part of a step: rows that add less are in trees before it is known what they bring
FIRST_NODES = 1  # of a text, until a step has shown what rows cost
LEAST_SHARE = 0.3  # of an even share of the end: a text that is ahead of the others is to end soon, too
CLOSE = 2.0  # tokens, or half a root of those that are left: by which texts fall behind each other by chance
LEARNED = 2.5  # times the seconds of a look that a step takes for it: it is learned from as well
UNEVEN = 0.25  # of a power of the number of texts: how much less than the mean the last of them gains


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSource:
    """What the texts of an engine have in common."""

    corpus: Corpus | None = None  # that they are continued by, beside themselves
    costs: StepCosts = field(default_factory=StepCosts)  # of passes, where no tuner knows them
    worth: DraftWorth = field(default_factory=DraftWorth)  # of the draft's trees
    streams: bool = False  # whether passes wait for weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """The nodes that a text's trees may have."""

    most: int  # below the root
    is_tuned: bool  # whether they are as many as pay; otherwise as many as may be
    draw: Draw
    device: torch.device
    streams: bool = False  # whether passes wait for weights, so that rows cost little from the first step on
    is_chain: bool = False  # whether a node may have but one child


class LookupChoice:
    """The looked up nodes of one text's trees."""

    def __init__(self, lookup: TextLookup, costs: StepCosts, limits: LookupLimits, worth: DraftWorth) -> None:
        self.lookup, self._costs, self._limits, self._worth = lookup, costs, limits, worth
        self._wants_draft = True  # whether the draft's nodes would pay beside what is looked up
        self._number = 0  # of the step
        self._alone: Sequence[LookedUp] | None = None  # that the step's tree would have without a draft; None: unknown
        self._since: list[int] = []  # tokens that the text has gained since it was looked up
        self._added = 0.0  # to a pass of roots alone, by what was looked up
        self._look_s = 0.0  # that the look took
        self._is_forced = False  # whether the step's nodes are tokens that had to come
        self._num_texts, self._share, self._look = 1, 1.0, Look.USED
        self.has_draft = False  # whether the draft grows in this step
        self.forced: Callable[[int], Sequence[tuple[int, float]]] | None = None  # tokens that have to come; None: none
        self.permits: Callable[[Path, int], bool] | None = None  # whether a token may follow a path; None: any may
        self.is_left_out: Callable[[], bool] = lambda: False  # in this step, which another tuning looks at

    @property
    def is_idle(self) -> bool:
        """Return whether the next few steps may be taken without asking: nothing is looked up, or waits for tokens."""
        return self._look is Look.NONE and self._alone is None and self.forced is None

    def begin_step(self, number: int, num_texts: int, share: float) -> None:
        """Take the step's number, how many texts share it, and this one's share in when all are done."""
        self._number, self._num_texts, self._share = number, num_texts, share
        if self._limits.is_tuned:
            self._look = self._choose_look(number, num_texts)

    def _choose_look(self, number: int, num_texts: int) -> Look:
        """Return what is looked up: where that does not pay, what follows tokens that stood before at the most."""
        look = self._costs.gain.look(number, num_texts, self._may_begin, self._kind_of_first_looks)
        if look is Look.USED or (look is Look.NONE and num_texts > 1):
            return look
        if self.lookup.repeats():
            return Look.USED if num_texts == 1 else Look.SEEN
        if look is Look.SEEN:
            self._costs.gain.learn(num_texts, 1, 0.0)  # little of what could be found would come
        return Look.NONE

    def growth(self, drafted: Growth, root: int, depth: int) -> Growth:
        """Return the growth of a tree with what was looked up, without the draft's where that does not pay."""
        assert not isinstance(drafted, Merged)
        limits = self._limits
        self.has_draft = not isinstance(drafted, TokenTree)
        is_waiting = self._look is not Look.USED and self._alone is not None  # for tokens that were seen before
        if self.forced is None and (is_waiting or self._look is Look.NONE):
            return drafted
        if not is_waiting:
            self._alone, self._since = None, []
        if self.is_left_out():
            return drafted
        looked_up = self._forced(depth) or self._candidates(depth)
        if looked_up is None:
            return drafted
        # Behind tokens that had to come a draft knows as much as without them.
        self._wants_draft = self._is_forced or (self._asks_worth and self._needs_draft(looked_up))
        # Of a chain, the best path is not the first nodes.
        most = limits.most if limits.is_chain else self._num_to_take([found.chance for found in looked_up], 0)
        self._alone = None if self._is_forced else looked_up[:most]
        if self._look is Look.SEEN and not self._is_forced:
            return drafted
        if self.has_draft and not self._wants_draft:
            drafted = root_only(root, draw=limits.draw, device=limits.device)
            self.has_draft = False
        if not self.has_draft:
            looked_up = looked_up[:most]
        if not looked_up:
            return drafted
        if isinstance(drafted, Beam) and not limits.is_tuned:
            drafted = replace(drafted, rivals=looked_up)
        return Merged(drafted=drafted, looked_up=looked_up, num_to_take=self._num_to_take, is_chain=limits.is_chain)

    def _forced(self, depth: int) -> Sequence[LookedUp]:
        """Return the tokens that the text goes on with whatever the model says, one below the other."""
        found, chance = list[LookedUp](), 1.0
        if self.forced is not None:
            for layer, (token, own) in enumerate(self.forced(min(depth, self._limits.most)), 1):
                chance *= own
                found.append(LookedUp(layer - 2, token, chance, layer))
        self._is_forced = bool(found)
        return found

    def _candidates(self, depth: int) -> Sequence[LookedUp] | None:
        """Return what was looked up; None where nothing is to be."""
        if self._look is Look.NONE:
            return None
        started = time.perf_counter()
        most = FIRST_NODES if self._is_first_look() else self._limits.most
        found = self.lookup.candidates(most, depth=depth, least=self._least_chance())
        self._look_s = time.perf_counter() - started
        return found if self.permits is None else permitted(found, self.permits)

    def learn(self, step: StepResult) -> None:
        """Learn what a step brought."""
        if self._alone is None and self._look is Look.NONE and not self.has_draft:
            return
        self._worth.learn(step, is_drafted=self.has_draft)
        if self._alone is None:
            return
        num_texts = self._num_texts
        if not self._since:
            self._added = self._price(step, num_texts)
        self._since += step.tokens
        num_found = _num_found(self._alone, self._since)
        if self._look is not Look.USED and num_found == len(self._since) and step.finish is None:
            return  # the tokens that come next may have been seen, too
        self._costs.gain.learn(num_texts, 1 + num_found, self._added, weight=self._weight())
        if self._wants_draft:
            self._costs.gain_left.learn(num_texts, 1 + num_found, self._added)
        self._alone = None

    def _price(self, step: StepResult, num_texts: int) -> float:
        """Return what share of a pass of roots alone was added by what the text looked up, and by looking."""
        plain_s = self._costs.plain_s(num_texts)
        added_s = self._costs.rows_s(num_texts, len(self._alone or ())) + LEARNED * self._look_s
        if not self.has_draft:
            added_s += step.grow_s / num_texts
        return added_s / plain_s

    def observe(self, cost: PassCost) -> None:
        """Learn what a step of all texts took, where no other tuning does."""
        self._costs.observe(cost)

    def _may_begin(self) -> bool:
        """Return whether rows have a price in company, which a step of roots shows where passes wait for no weights."""
        num_texts = self._num_texts
        return num_texts == 1 or self._limits.streams or self._costs.passes(num_texts).times_seen(num_texts) > 0

    def _kind_of_first_looks(self) -> Look:
        """Return what the first looks are: they have rows where these cost little by the pass over the prompts."""
        num_texts = self._num_texts
        has_rows = num_texts == 1 or self._limits.streams or self._costs.row_share(num_texts) < CHEAP
        return Look.USED if has_rows else Look.SEEN

    def _is_first_look(self) -> bool:
        """Return whether rows have a price that no pass has shown yet."""
        num_texts, limits = self._num_texts, self._limits
        has_price = limits.is_tuned and not limits.streams and num_texts > 1
        return has_price and not self._costs.passes(num_texts).is_timed_above(num_texts)

    @property
    def _asks_worth(self) -> bool:
        """Return whether to see whether the draft's nodes pay: few steps without it say what others leave to it."""
        return self.has_draft or self._number % ASKED == 0

    def _needs_draft(self, looked_up: Sequence[LookedUp]) -> bool:
        """Return whether the draft is to grow: its nodes may be among the best, and they pay."""
        limits, num_texts, worth = self._limits, self._num_texts, self._worth
        if is_filled(looked_up, limits.most):
            return False
        if not worth.is_known or (limits.is_tuned and not looked_up):  # there the tuner chooses
            return True
        passes = self._costs.passes(num_texts)
        chances = [found.chance for found in looked_up]
        num_nodes = self._num_to_take(chances, 0)
        if not passes.is_timed_within(num_texts + num_nodes):
            return False  # a step without the draft shows what its rows take
        # The draft's nodes are rows of the pass as well.
        alone_s = passes.seconds(num_texts + num_nodes) / num_texts
        beside_s = passes.seconds(num_texts + max(num_nodes, round(worth.nodes))) / num_texts + worth.grow_s
        by_layer = _by_layer(looked_up[:num_nodes])
        return worth.pays(by_layer, beside_s - alone_s, first_per_s=(1 + sum(by_layer)) / alone_s)

    def _num_to_take(self, chances: Sequence[float], num_drafted: int) -> int:
        """Return how many of a tree's nodes, best first, are most tokens a second; at least as many as the draft has.

        The other texts are taken to have their roots alone: most have nothing to look up at the same time.
        """
        most = min(len(chances), self._limits.most)
        if not self._limits.is_tuned or not most:
            return most
        passes, num_texts = self._costs.passes(self._num_texts), self._num_texts
        beside_s = num_texts * self._worth.grow_s if num_drafted else 0.0
        best, best_per_s, tokens, weight = 0, 0.0, float(num_texts), self._weight()
        for count in range(most + 1):
            if count:
                tokens += weight * chances[count - 1]
            if count < STEP or count % STEP == 0 or count == most:
                seconds = passes.seconds(num_texts + count) + beside_s
                per_s = tokens / seconds if seconds else tokens
                if per_s > best_per_s:
                    best, best_per_s = count, per_s
        return max(best, min(num_drafted, most))

    def _weight(self) -> float:
        """Return what a token of this text is worth, where one of each text is worth their step.

        It saves a row of a later pass, and by its text's share in when all are done a step's other seconds.
        """
        num_texts = self._num_texts
        step_s, row_s = self._costs.roots(num_texts, self._limits.most)
        if num_texts == 1 or not step_s:
            return 1.0
        of_rows = min(1.0, num_texts * row_s / step_s)
        return of_rows + num_texts * max(self._share, LEAST_SHARE / num_texts) * (1 - of_rows)

    def _least_chance(self) -> float:
        """Return the chance below which a node does not pay for its row, whatever else is there."""
        num_texts = self._num_texts
        step_s, row_s = self._costs.roots(num_texts, self._limits.most)
        if not self._limits.is_tuned or not step_s:
            return LEAST_CHANCE
        pays_from = num_texts * row_s / step_s / self._weight()
        return min(1.0, max(LEAST_CHANCE, SURE_LOSS * pays_from))


def shares_of_end(num_left: Sequence[int]) -> list[float]:
    """Return each text's share in when all are done, of texts that may still gain so many tokens.

    All are done when the last one is: tokens of one that is ahead of the others shorten little but its own time.
    """
    most = max(num_left, default=0)
    close = max(CLOSE, math.sqrt(most) / 2)
    parts = [math.exp((left - most) / close) for left in num_left]
    over = sum(parts) * len(parts) ** UNEVEN
    return [part / over for part in parts]


def permitted(candidates: Sequence[LookedUp], permits: Callable[[Path, int], bool]) -> Sequence[LookedUp]:
    """Return the candidates that may come at their places; parents stand before their children."""
    paths: list[Path | None] = []  # of the candidates; None: they may not come
    places, kept = {-1: -1}, list[LookedUp]()
    for number, found in enumerate(candidates):
        above = () if found.parent < 0 else paths[found.parent]
        if above is None or not permits(above, found.token):
            paths.append(None)
            continue
        paths.append((*above, found.token))
        places[number] = len(kept)
        kept.append(replace(found, parent=places[found.parent]))
    return kept


def is_filled(looked_up: Sequence[LookedUp], most: int) -> bool:
    """Return whether looked up nodes are the best `most` nodes that a tree could have.

    What else may follow a node has at most the chance that those which are known below it leave.
    """
    if len(looked_up) < most:
        return False
    left = [1.0, *(found.chance for found in looked_up)]  # of the text's last token and of each candidate
    for found in looked_up:
        left[found.parent + 1] -= found.chance
    return max(left) <= min(found.chance for found in looked_up)


def _num_found(looked_up: Sequence[LookedUp], tokens: Sequence[int]) -> int:
    """Return how many of a text's next tokens were looked up, one below the other."""
    places = {(found.parent, found.token): index for index, found in enumerate(looked_up)}
    index = -1
    for count, token in enumerate(tokens):
        if (index, token) not in places:
            return count
        index = places[index, token]
    return len(tokens)


def _by_layer(looked_up: Sequence[LookedUp]) -> list[float]:
    """Return the chance that the text goes through any candidate of a layer: of each layer below the root."""
    chances = [0.0] * max((found.layer for found in looked_up), default=0)
    for found in looked_up:
        chances[found.layer - 1] += found.chance
    return chances
