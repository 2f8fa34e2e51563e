"""Settings become growth: every policy is found by its name, with the files that it reads.

Policies are opened before weights are read, so that a file that is damaged or missing is named at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.draft import Drafter
from edgespec.grow import Grow, Growth
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.grow.adaptive import adaptive_rule
from edgespec.grow.beam import Beam, BeamRule
from edgespec.grow.best_first import PredictSlots, grow_best_first
from edgespec.grow.c2t import c2t_rule, classifier_exit
from edgespec.grow.classifier import Classifier, default_classifier
from edgespec.grow.dyspec import predict_slots
from edgespec.grow.eagle2 import eagle2_rule
from edgespec.grow.opt_tree import OPT_TREE_RULE
from edgespec.grow.sequoia import best_shape
from edgespec.grow.static import Stops, grow_static, static_shape
from edgespec.grow.stop_model import StopModel, model_exit
from edgespec.grow.text_draws import TextDraws
from edgespec.tree.policies import POLICIES, Draw
from edgespec.tree.settings import TreeSettings, preset_shape
from edgespec.tree.shapes import TreeShape
from edgespec.tree.token_tree import root_only


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    """A policy's settings, and the contents of their files."""

    settings: TreeSettings
    acceptance: AcceptanceModel | None  # where measured acceptance decides on trees
    classifier: Classifier | None
    stop_model: StopModel | None

    @property
    def draw(self) -> Draw:
        """Return how children come about."""
        return self.settings.children

    def with_acceptance(self, model: AcceptanceModel) -> OpenPolicy:
        """Return the policy on another measured acceptance; nothing changes where it uses none."""
        return replace(self, acceptance=model) if self.acceptance is not None else self


# The dynamic policies of each draw
PREDICTIONS: dict[str, PredictSlots] = {"dyspec": predict_slots}
BEAM_RULES: dict[str, Callable[[OpenPolicy], BeamRule]] = {
    "adaptive": lambda policy: adaptive_rule(_measured(policy)),
    "opt-tree": lambda _policy: OPT_TREE_RULE,
    "eagle2": lambda policy: eagle2_rule(
        width=policy.settings.width,
        stop_depths=frozenset(policy.settings.stop_depths),
        stop_log_probability=policy.settings.stop_log_probability,
    ),
    "c2t": lambda policy: c2t_rule(_classifier(policy), width=policy.settings.width),
}


def open_policy(settings: TreeSettings) -> OpenPolicy:
    """Read the files that a policy needs; raises EdgespecError."""
    classifier = Classifier.load(settings.classifier) if settings.classifier else None
    if POLICIES[settings.policy].has_classifier and classifier is None:
        classifier = default_classifier()
    acceptance = None
    if settings.uses("acceptance"):
        acceptance = AcceptanceModel.load(settings.acceptance) if settings.acceptance else default_acceptance()
    return OpenPolicy(
        settings=settings,
        acceptance=acceptance,
        classifier=classifier,
        stop_model=StopModel.load(settings.stop_model) if settings.stop_model else None,
    )


def make_grow(
    policy: OpenPolicy, drafter: Drafter | None, draws: TextDraws, *, largest_tree: TreeSettings | None = None
) -> Grow:
    """Return the policy as a function of the root and of the layers that can still be of use.

    With `largest_tree`, a beam's nodes are the text's share of those of all trees that grow
    together, and its own tree may be as large as the room.
    """
    settings, draw = policy.settings, policy.draw
    kind = POLICIES[settings.policy].kind
    if drafter is None or not POLICIES[settings.policy].needs_draft:
        return lambda root, _max_depth: root_only(root, draw=draw, device=draws.device)
    if kind == "static":
        static = partial(
            grow_static,
            shape=static_shape(_shape(policy, draws.sampling), draws.device),
            draw=draw,
            draws=draws,
            stops=_stops(policy, drafter),
        )
        return lambda root, max_depth: static(root, depth=max_depth)
    if draw == "sampled":
        best_first = partial(
            grow_best_first,
            predict=PREDICTIONS[settings.policy],
            size=settings.size,
            threshold=settings.threshold,
            max_children=settings.width,
            draws=draws,
        )
        return lambda root, max_depth: best_first(root, depth=min(settings.depth, max_depth))
    widest = settings if largest_tree is None else largest_tree
    beam = partial(
        Beam,
        rule=BEAM_RULES[settings.policy](policy),
        draw=draw,
        size=widest.num_nodes,
        share=None if largest_tree is None else settings.num_nodes,
        max_children=settings.max_children or POLICIES[settings.policy].default_width,
        device=draws.device,
        threshold=settings.beta if POLICIES[settings.policy].has_classifier else settings.threshold,
        stop_gain=settings.stop_gain,
        temperature=draws.sampling.temperature,
        noise=draws.shared_noise if draw == "coupled" else None,
        keeps_draft_probs=draws.keeps_draft_probs,
    )

    return lambda root, max_depth: beam(root=root, depth=min(settings.depth, max_depth))


def grow_below_branches(policy: OpenPolicy, drafter: Drafter, draws: TextDraws) -> Callable[[int, int, Tensor], Growth]:
    """Return a static policy's growth below given children [w] of the root, at most as many as its shape has there."""
    static = partial(
        grow_static,
        shape=static_shape(_shape(policy, draws.sampling), draws.device),
        draw=policy.draw,
        draws=draws,
        stops=_stops(policy, drafter),
    )
    return lambda root, max_depth, branches: static(root, depth=max_depth, first_tokens=branches)


def _measured(policy: OpenPolicy) -> AcceptanceModel:
    assert policy.acceptance is not None
    return policy.acceptance


def _classifier(policy: OpenPolicy) -> Classifier:
    assert policy.classifier is not None
    return policy.classifier


def _shape(policy: OpenPolicy, sampling: SamplingSettings) -> TreeShape:
    settings = policy.settings
    preset = preset_shape(settings)
    if preset is not None:
        return preset
    return best_shape(
        tuple(_measured(policy).rank_acceptance(sampling.temperature, policy.draw)),
        size=settings.size,
        depth=settings.depth,
        max_children=settings.width,
    )


def _stops(policy: OpenPolicy, drafter: Drafter) -> Stops | None:
    if policy.classifier is not None:
        return classifier_exit(policy.classifier, confidence=policy.settings.beta)
    if policy.stop_model is not None:
        return model_exit(policy.stop_model, drafter, confidence=policy.settings.beta)
    return None
