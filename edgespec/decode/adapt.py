"""Adaptive trees of a profiled pair follow what the steps so far say about the next one.

The steps say whether more or less is accepted than was predicted, and what a second is worth. Each step's tree is
grown with what earlier steps showed, never with anything of its own, so the output stays the target's. Seconds are
the profile's, not a clock's, so a seed gives the same text again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from edgespec.decode.step import StepResult
from edgespec.grow import Grow
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.policies import OpenPolicy
from edgespec.profiled import plan_at, verify_curve
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from profiles.cost import Curve
from profiles.schema import Plan, Profile

MEMORY = 0.9  # of the running means: about ten steps
PRIOR_TOKENS = 0.5  # on both sides of a ratio, so that a few bad steps are no verdict
RATE = 0.1  # of a step's surprise that goes into the log odds
MAX_SHIFT = 1.0
SHIFT_GRID = 0.05  # few different models, so that each is made once
MAX_FACTOR = 3.0  # between the plan's threshold and the one in use
MAX_THRESHOLD = 0.9  # a larger one would leave no tree, and 1 is none


class Follower:
    """The running means of one text, and the settings that follow from them."""

    def __init__(self, plan: Plan, *, verify: Curve) -> None:
        self._plan, self._verify = plan, verify
        self._rest_s = max(0.0, (plan.measured_step_s or plan.step_s) - float(verify(plan.nodes)))
        self._tokens, self._step_s = plan.tokens, plan.measured_step_s or plan.step_s
        # Growth bounds a node's gain by its ancestors', so that its promises are low on the whole: no surprise.
        promised = plan.promised if plan.promised is not None else plan.tokens
        self._usual = _surprise(plan.tokens - 1.0, promised - 1.0)
        self._accepted, self._predicted = plan.tokens - 1.0, promised - 1.0
        self._expected = 0.0  # accepted tokens that the tree of this step promises
        self.shift = 0.0  # of the acceptance model's log odds

    @property
    def threshold(self) -> float:
        """Return the plan's threshold, moved as far as tokens a second are above or below the plan's."""
        faster = (self._tokens / self._step_s) / self._plan.tokens_per_s
        return min(MAX_THRESHOLD, self._plan.threshold * min(MAX_FACTOR, max(1 / MAX_FACTOR, faster)))

    def expect(self, tree: TokenTree) -> None:
        """Note what the tree promises, before it is verified."""
        assert tree.scores is not None
        self._expected = float(tree.scores[1:].sum())

    def learn(self, step: StepResult) -> None:
        """Note what verification made of the tree, before the next one grows."""
        if step.is_prefill:
            return
        self._accepted = _mean(self._accepted, len(step.tokens) - 1.0)
        self._predicted = _mean(self._predicted, self._expected)
        self._tokens = _mean(self._tokens, float(len(step.tokens)))
        self._step_s = _mean(self._step_s, self._rest_s + float(self._verify(step.num_drafted)))
        surprise = _surprise(self._accepted, self._predicted) - self._usual
        self.shift = min(MAX_SHIFT, max(-MAX_SHIFT, self.shift + RATE * surprise))


def make_follower(profile: Profile | None, tree: TreeSettings, *, temperature: float) -> Follower | None:
    """Return a follower for one text; None where the trees are not those that the profile planned."""
    if profile is None or not POLICIES[tree.policy].is_calibrated:
        return None
    plan = plan_at(profile, temperature).best
    is_planned = (plan.policy, plan.threshold) == (tree.policy, tree.threshold)
    return Follower(plan, verify=verify_curve(profile)) if is_planned else None


def following(policy: OpenPolicy, follower: Follower, make: Callable[[OpenPolicy], Grow]) -> Grow:
    """Return a growth of adaptive trees by what the follower knows before each step.

    `make` is `make_grow` for a policy.
    """

    def grow(root: int, max_depth: int, branches: Tensor | None = None, /) -> TokenTree:
        assert policy.acceptance is not None
        settings = replace(policy.settings, threshold=follower.threshold)
        model = _shifted(policy.acceptance, round(follower.shift / SHIFT_GRID))
        tree = make(replace(policy, settings=settings, acceptance=model))(root, max_depth, branches)
        if tree.scores is not None:
            follower.expect(tree)
        return tree

    return grow


def _surprise(accepted: float, predicted: float) -> float:
    return math.log((accepted + PRIOR_TOKENS) / (predicted + PRIOR_TOKENS))


def _mean(mean: float, value: float) -> float:
    return MEMORY * mean + (1 - MEMORY) * value


@functools.lru_cache(maxsize=64)
def _shifted(model: AcceptanceModel, steps: int) -> AcceptanceModel:
    """Return the model with its log odds moved by so many steps of the grid."""
    return model.shifted(steps * SHIFT_GRID) if steps else model
