"""From settings to growth: every policy by its name, with the files that it reads.

Made before weights are read, so that a file that is damaged or missing is named at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.draft import Drafter
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.grow.adaptive import adaptive_rule, adaptive_slots
from edgespec.grow.beam import BeamRule, grow_beam
from edgespec.grow.best_first import PredictSlots, grow_best_first
from edgespec.grow.c2t import c2t_rule, classifier_exit
from edgespec.grow.classifier import Classifier, default_classifier
from edgespec.grow.dyspec import predict_slots
from edgespec.grow.eagle2 import eagle2_rule
from edgespec.grow.opt_tree import opt_tree_rule
from edgespec.grow.sequoia import best_shape
from edgespec.grow.static import Stops, grow_static, static_shape
from edgespec.grow.stop_model import StopModel, model_exit
from edgespec.tree.settings import DRAWS, TreeSettings, preset_shape
from edgespec.tree.shapes import TreeShape
from edgespec.tree.token_tree import Draw, TokenTree, root_only

Grow = Callable[[int, int], TokenTree]  # root token, most layers that can be of use -> tree
BEAM_POLICIES = {"opt-tree", "eagle2", "c2t"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings, and what was read for them."""

    settings: TreeSettings
    acceptance: AcceptanceModel | None  # adaptive's, and Sequoia's rates
    classifier: Classifier | None
    stop_model: StopModel | None

    def draw(self, sampling: SamplingSettings) -> Draw:
        """How children come about for a target that is sampled so."""
        if self.settings.draw is not None:
            return "top_k" if DRAWS[self.settings.draw] == "top_k" else "without_replacement"
        if self.settings.policy in BEAM_POLICIES:
            return "top_k"
        if self.settings.policy == "adaptive":
            assert self.acceptance is not None
            return self.acceptance.better_draw(sampling.temperature)
        return "without_replacement"

    def with_acceptance(self, model: AcceptanceModel) -> Policy:
        """The same policy on another measured acceptance; nothing changes where it uses none."""
        return replace(self, acceptance=model) if self.acceptance is not None else self


def open_policy(settings: TreeSettings) -> Policy:
    """Read the files that a policy needs; raises EdgespecError."""
    policy = settings.policy
    needs_acceptance = policy in {"adaptive", "sequoia"}
    needs_classifier = policy == "c2t" or settings.classifier is not None
    return Policy(
        settings=settings,
        acceptance=(
            (AcceptanceModel.load(settings.acceptance) if settings.acceptance else default_acceptance())
            if needs_acceptance
            else None
        ),
        classifier=(
            (Classifier.load(settings.classifier) if settings.classifier else default_classifier())
            if needs_classifier
            else None
        ),
        stop_model=StopModel.load(settings.stop_model) if settings.stop_model else None,
    )


def make_grow(
    policy: Policy,
    drafter: Drafter | None,
    *,
    sampling: SamplingSettings,
    vocab: int,
    device: torch.device,
    generator: torch.Generator,
) -> Grow:
    """The policy as a function of the root and of the layers that can still be of use."""
    settings, draw = policy.settings, policy.draw(sampling)
    if drafter is None or settings.policy == "none":
        return lambda root, _max_depth: root_only(root, draw=draw, vocab=vocab, device=device)
    if settings.policy in {"sequoia", "specinfer", "mcsd", "chain", "static"}:
        shape = static_shape(_shape(policy, sampling), device)
        stops = _stops(policy, drafter)
        return lambda root, max_depth: grow_static(
            drafter,
            root,
            shape=shape,
            depth=max_depth,
            draw=draw,
            stops=stops,
            vocab=vocab,
            device=device,
            generator=generator,
        )
    if draw == "top_k":
        rule = _beam_rule(policy, sampling)
        return lambda root, max_depth: grow_beam(
            drafter,
            root,
            rule=rule,
            size=settings.num_nodes,
            depth=min(settings.depth, max_depth),
            max_children=settings.width,
            vocab=vocab,
            device=device,
        )
    predict = _predict(policy, sampling)
    return lambda root, max_depth: grow_best_first(
        drafter,
        root,
        predict=predict,
        size=settings.size,
        depth=min(settings.depth, max_depth),
        threshold=settings.threshold,
        max_children=settings.width,
        vocab=vocab,
        device=device,
        generator=generator,
    )


def make_grow_branches(
    policy: Policy,
    drafter: Drafter,
    *,
    sampling: SamplingSettings,
    vocab: int,
    device: torch.device,
    generator: torch.Generator,
) -> Callable[[int, Tensor, int], TokenTree]:
    """The same where the root's children are given: for target-initialised trees."""
    shape, draw = static_shape(_shape(policy, sampling), device), policy.draw(sampling)
    stops = _stops(policy, drafter)
    return lambda root, branches, max_depth: grow_static(
        drafter,
        root,
        shape=shape,
        depth=max_depth,
        draw=draw,
        stops=stops,
        vocab=vocab,
        device=device,
        generator=generator,
        first_tokens=branches,
    )


def _predict(policy: Policy, sampling: SamplingSettings) -> PredictSlots:
    if policy.acceptance is None:
        return predict_slots
    return adaptive_slots(policy.acceptance, temperature=sampling.temperature)


def _beam_rule(policy: Policy, sampling: SamplingSettings) -> BeamRule:
    settings = policy.settings
    if settings.policy == "opt-tree":
        return opt_tree_rule(size=settings.size, stop_gain=settings.stop_gain)
    if settings.policy == "eagle2":
        return eagle2_rule(
            width=settings.width,
            stop_depths=frozenset(settings.stop_depths),
            stop_log_probability=settings.stop_log_probability,
        )
    if settings.policy == "c2t":
        assert policy.classifier is not None
        return c2t_rule(policy.classifier, confidence=settings.beta, width=settings.width)
    assert policy.acceptance is not None
    return adaptive_rule(policy.acceptance, temperature=sampling.temperature, threshold=settings.threshold)


def _shape(policy: Policy, sampling: SamplingSettings) -> TreeShape:
    settings = policy.settings
    preset = preset_shape(settings)
    if preset is not None:
        return preset
    assert policy.acceptance is not None
    return best_shape(
        tuple(policy.acceptance.rank_acceptance(sampling.temperature, policy.draw(sampling))),
        size=settings.size,
        depth=settings.depth,
        max_children=settings.width,
    )


def _stops(policy: Policy, drafter: Drafter) -> Stops | None:
    if policy.classifier is not None:
        return classifier_exit(policy.classifier, confidence=policy.settings.beta)
    if policy.stop_model is not None:
        return model_exit(policy.stop_model, drafter, confidence=policy.settings.beta)
    return None
