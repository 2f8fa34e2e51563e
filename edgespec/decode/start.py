"""Start a text under a policy: its growth, its rule of verification, and its next steps."""

from typing import Any

from edgespec.decode.sequence import Sequence, TextSettings, processors_of
from edgespec.decode.target_initialized import BranchedSequence
from edgespec.draft import Drafter
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.draft.lookup import TextLookup
from edgespec.grow.policies import OpenPolicy, grow_below_branches, make_grow
from edgespec.grow.text_draws import TextDraws
from edgespec.model.target import Target
from edgespec.tree.looked_up import may_look_up
from edgespec.tuning.lookup_choice import LookupChoice, LookupLimits, LookupSource
from edgespec.tuning.tuner import TextTuning, Tuner, may_follow_clock
from edgespec.verify.rules import verifier


def start_sequence(
    target: Target,
    drafter: Drafter | None,
    policy: OpenPolicy,
    settings: TextSettings,
    draws: TextDraws,
    *,
    tuner: Tuner | None = None,
    lookup: LookupSource | None = None,
) -> Sequence:
    """Return a text whose trees grow by the policy, and have what is looked up where its rule allows that.

    With a `tuner` they are those that pay, where the text does not depend on them.
    """
    sampling = settings.sampling
    processors = processors_of(settings, target.vocab, target.device)
    if drafter is not None:
        drafter.process = None if processors is None else processors.on_draft
    parts: dict[str, Any] = {
        "target": target,
        "drafter": drafter,
        "settings": settings,
        "generator": draws.generator,
        "noise": draws.noise,
        "draws_coupled": policy.draw == "coupled",
        "grow": make_grow(policy, drafter, draws),
        "plain": make_grow(policy, None, draws),
        "verify": verifier(sampling, policy.draw, draws.noise),
        "processors": processors,
        "draft_depth": drafter.max_depth if isinstance(drafter, LanguageModelDrafter) else None,
        "draft_context": drafter.model.max_context if isinstance(drafter, LanguageModelDrafter) else None,
    }
    if drafter is not None and not policy.settings.is_lossless:
        below = grow_below_branches(policy, drafter, draws)
        return BranchedSequence(width=policy.settings.target_width, grow_below=below, **parts)
    if lookup is not None and may_look_up(policy.settings, sampling):
        most = policy.settings if tuner is None else tuner.largest_tree
        limits = LookupLimits(
            most=most.num_nodes,
            is_tuned=tuner is not None,
            draw=policy.draw,
            device=draws.device,
            streams=lookup.streams,
            is_chain=not target.takes_branches,
        )
        costs = lookup.costs if tuner is None else tuner.costs
        choice = parts["lookup"] = LookupChoice(TextLookup(lookup.corpus), costs, limits, lookup.worth)
        if processors is not None and processors.has_grammar:
            choice.forced, choice.permits = processors.forced, processors.permits
    sequence = Sequence(**parts)
    if tuner is not None and drafter is not None:
        assert may_follow_clock(policy.settings, sampling)
        tuning = TextTuning(tuner, sampling)
        sequence.grow = tuning.grow(
            policy, lambda now: make_grow(now, drafter, draws, largest_tree=tuner.largest_tree), sequence.plain
        )
        sequence.tuning = tuning
        if sequence.lookup is not None:
            sequence.lookup.is_left_out = lambda: tuning.is_plain_probe
    return sequence
