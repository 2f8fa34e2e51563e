"""Self-tuning: an engine learns from its own steps what passes cost and trees yield, and grows the trees that pay.

Only texts that do not depend on their trees are tuned: there a clock may decide. The results live as long as
the engine: costs for all texts, acceptance for each way of sampling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edgespec.config import SamplingSettings
from edgespec.grow import Grow, Growth
from edgespec.grow.policies import OpenPolicy
from edgespec.tree.policies import DEFAULT_POLICY, POLICIES
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.calibration import GrownTree
from edgespec.tuning.costs import GrowthCosts, StepCosts
from edgespec.tuning.draft_facts import DraftFacts
from edgespec.tuning.memory import known_costs, plan_at, plan_for_texts, recall
from edgespec.tuning.settings import TuningSettings
from edgespec.tuning.step import PassCost, StepResult
from edgespec.tuning.tree_choice import SIZES, TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from profiles.schema import Profile

FIRST_SIZE = 8
MIN_LIMIT = 4
MAX_SETTINGS = 256  # that are kept: making them checks them
MAX_SAMPLINGS = 16  # ways of sampling that are remembered


def may_follow_clock(tree: TreeSettings, sampling: SamplingSettings) -> bool:
    """Return whether the text is the same with any trees, so that seconds may decide on them."""
    return tree.is_lossless and (sampling.temperature == 0 or tree.children == "coupled")


class Tuner:
    """What an engine has learned of its trees."""

    def __init__(
        self,
        tree: TreeSettings,
        largest_tree: TreeSettings,
        *,
        first_size: int | None = None,
        profile: Profile | None = None,
        num_texts: int = 1,
        tuning: TuningSettings | None = None,
        draft: DraftFacts | None = None,
    ) -> None:
        """Begin with these trees, of `first_size` nodes; `largest_tree` is what memory is planned for.

        Adaptive trees begin with a profile's results for `num_texts` running texts.
        """
        self.largest_tree, self._tuning = largest_tree, tuning
        self._budget = POLICIES[largest_tree.policy].budget
        most = largest_tree.num_nodes
        first = min(most, first_size or FIRST_SIZE)
        # Where nodes must be worth their cost, that makes trees small; a limit of one would hide what more are worth.
        least = MIN_LIMIT if largest_tree.uses("threshold") else 1
        self._sizes = (
            sorted({size for size in SIZES if least <= size < most} | {first, most}) if self._budget else [most]
        )
        self._start = TreeLimits(first if self._budget else most, tree.threshold, tree.stop_gain)
        self._draft = draft or DraftFacts()
        calls, tried = self._draft.calls, self._draft.growth
        growth = GrowthCosts(calls=calls)
        self._costs = StepCosts(growth=growth) if profile is None else known_costs(profile, calls)
        if tried is not None and profile is None:
            growth.observe(tried.layers, tried.nodes, tried.seconds)
            growth.row_s = tried.row_s
        is_profiled = largest_tree.policy == DEFAULT_POLICY and largest_tree.children == "coupled"
        self._profile, self._num_texts = profile if is_profiled else None, num_texts
        self._choices: dict[SamplingSettings, TreeChoice] = {}

    @property
    def costs(self) -> StepCosts:
        """The seconds of passes and of growth."""
        return self._costs

    def choice(self, sampling: SamplingSettings) -> TreeChoice:
        """Return the choice for texts that are sampled so; a new one begins with the present state of others."""
        found = self._choices.pop(sampling, None)
        if found is None:
            while len(self._choices) >= MAX_SAMPLINGS:
                del self._choices[next(iter(self._choices))]
            start = next(reversed(self._choices.values())).limits if self._choices else self._start
            shares_budget = self.largest_tree.shares_budget
            found = TreeChoice(
                self._costs, self._sizes, start=start, shares_budget=shares_budget, tuning=self._tuning,
                usual=() if self._profile else self._draft.usual_trees(sampling.temperature),
                streams=self._draft.target_streams,
            )  # fmt: skip
            if self._profile is not None:
                recall(found, plan_for_texts(plan_at(self._profile, sampling.temperature), self._num_texts))
        self._choices[sampling] = found  # the one used last stands last
        return found

    def smaller_tree(self) -> TreeSettings | None:
        """Return what to go on with where memory ran out: less than the last tree, which did not fit."""
        last = next(reversed(self._choices.values())).last if self._choices else self._start
        return _settings(
            self.largest_tree, TreeLimits(last.size, self.largest_tree.threshold, self.largest_tree.stop_gain)
        ).smaller()

    def settings(self, limits: TreeLimits) -> TreeSettings:
        """Return the settings of a step's tree; where trees share a budget, its size is what the tree adds to that."""
        return _settings(self.largest_tree, limits)


class TextTuning:
    """The trees of one text, which share what the tuner knows with others of the same sampling."""

    def __init__(self, tuner: Tuner, sampling: SamplingSettings) -> None:
        self._tuner, self._choice = tuner, tuner.choice(sampling)
        self._growing: tuple[TreeLimits, int] | None = None  # the limits and most layers of the growing tree
        self._grown: GrownTree | None = None  # of the running step
        self._choice.begin_text()

    def grow(self, policy: OpenPolicy, make: Callable[[OpenPolicy], Grow], plain: Grow) -> Grow:
        """Return a growth of the trees that pay; `make` is `make_grow` for a policy, `plain` grows roots only."""

        def grow(root: int, max_depth: int) -> Growth:
            self._grown = None
            limits = self._choice.in_step
            self._growing = None if limits is None else (limits, max_depth)
            if limits is None:
                return plain(root, max_depth)
            return make(replace(policy, settings=self._tuner.settings(limits)))(root, max_depth)

        return grow

    @property
    def is_plain_probe(self) -> bool:
        """Return whether the step is to show what a pass of roots alone takes."""
        return self._choice.in_step is None and not self._choice.is_plain

    @property
    def is_idle(self) -> bool:
        """Return whether the next few steps may be taken without asking: they have no trees, and nothing is tried."""
        return self._choice.is_idle

    def take_tree(self, tree: TokenTree) -> None:
        """Take the tree that came of the growth."""
        if self._growing is not None:
            limits, max_depth = self._growing
            self._grown = self._choice.expect(tree, limits, max_depth)

    def begin_step(self, number: int, num_texts: int, num_unread: int) -> None:
        """Let the step's trees be chosen, once for all texts."""
        self._choice.begin_step(number, num_texts, num_unread)

    def learn(self, step: StepResult) -> None:
        """Learn what the text's own tree yielded."""
        self._choice.learn(step, self._grown)

    def observe(self, cost: PassCost) -> None:
        """Learn what a step of all texts took."""
        self._choice.observe(cost)


@functools.lru_cache(maxsize=MAX_SETTINGS)
def _settings(largest_tree: TreeSettings, limits: TreeLimits) -> TreeSettings:
    values: dict[str, Any] = {"threshold": limits.threshold, "stop_gain": limits.stop_gain}
    budget = POLICIES[largest_tree.policy].budget
    if budget is not None:
        values[budget] = limits.size
    return replace(largest_tree, **{name: value for name, value in values.items() if largest_tree.uses(name)})
