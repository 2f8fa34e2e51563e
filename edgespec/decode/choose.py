"""The loop that a policy asks for: plain or tree decoding, with the last steps followed, or target-initialised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode.adapt import following, make_follower
from edgespec.decode.loop import Session, StepResult, decode
from edgespec.decode.target_initialized import decode_target_initialized
from edgespec.grow.policies import OpenPolicy, make_grow
from edgespec.verify.rules import verifier
from profiles.schema import Profile


def continue_text(
    session: Session,
    prompt: Tensor,
    *,
    policy: OpenPolicy,
    profile: Profile | None,
    sampling: SamplingSettings,
    generator: torch.Generator,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    capacities: tuple[int, int],
) -> Iterator[StepResult]:
    """Continue prompt [n]: see `decode`. `profile` is the one that the settings come from, if any."""
    tree, drafter = policy.settings, session.drafter
    growth: dict[str, Any] = {
        "sampling": sampling,
        "vocab": session.target.vocab,
        "device": session.target.device,
        "generator": generator,
    }
    loop: dict[str, Any] = {
        "verify": verifier(sampling, policy.draw(sampling)),
        "sampling": sampling,
        "generator": generator,
        "max_new_tokens": max_new_tokens,
        "stop_tokens": stop_tokens,
        "capacities": capacities,
    }
    follower = make_follower(profile, tree, temperature=sampling.temperature)
    if follower is not None and drafter is not None:
        moving = following(policy, follower, lambda now: make_grow(now, drafter, **growth))
        return follower.follow(decode(session, prompt, grow=moving, **loop))
    grow = make_grow(policy, drafter, **growth)
    if tree.is_lossless or drafter is None:
        return decode(session, prompt, grow=grow, **loop)
    return decode_target_initialized(session, prompt, grow=grow, width=tree.target_width, **loop)
