"""Turn a policy into a text under way: its growth, its rule of verification, and its loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from edgespec.decode.adapt import Tuner, may_follow_clock, tuned
from edgespec.decode.loop import decode
from edgespec.decode.session import Session, TextSettings
from edgespec.decode.step import StepResult
from edgespec.decode.target_initialized import decode_target_initialized
from edgespec.draft import Drafter
from edgespec.grow.policies import OpenPolicy, make_grow
from edgespec.model.target import Target
from edgespec.sampling.noise import TextNoise
from edgespec.verify.rules import verifier


def start_session(
    target: Target,
    drafter: Drafter | None,
    policy: OpenPolicy,
    settings: TextSettings,
    generator: torch.Generator,
    noise: TextNoise,
    *,
    tuner: Tuner | None = None,
    keeps_q: bool = False,
) -> Session:
    """Return a session whose trees grow by the policy.

    With a `tuner` they are those that pay, where the text does not depend on them. `keeps_q` is for records: trees keep
    the draft's distributions.
    """
    sampling = settings.sampling
    growth: dict[str, Any] = {
        "sampling": sampling, "device": target.device, "generator": generator, "noise": noise,
        "keeps_q": keeps_q,
    }  # fmt: skip
    session = Session(
        target=target,
        drafter=drafter,
        settings=settings,
        generator=generator,
        noise=noise,
        draws_coupled=policy.draw == "coupled",
        grow=make_grow(policy, drafter, **growth),
        verify=verifier(sampling, policy.draw, noise),
    )
    if tuner is not None and drafter is not None:
        assert may_follow_clock(policy.settings, sampling)
        choice = tuner.choice(sampling)
        choice.begin_text()
        plain = make_grow(policy, None, **growth)
        session.grow = tuned(policy, tuner, choice, lambda now: make_grow(now, drafter, **growth), plain)
        session.learn = choice.learn
    return session


def continue_text(session: Session, prompt: Tensor, policy: OpenPolicy) -> Iterator[StepResult]:
    """Continue prompt [n] in the loop that the policy asks for: see `decode`."""
    if policy.settings.is_lossless or session.drafter is None:
        return decode(session, prompt)
    return decode_target_initialized(session, prompt, width=policy.settings.target_width)
