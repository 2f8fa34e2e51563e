"""How texts are drawn whose requests do not say it."""

from __future__ import annotations

from dataclasses import replace

from edgespec.config import SamplingSettings
from edgespec.pair.pair import ModelPair


def sampling_of_requests(pair: ModelPair, temperature: float | None) -> SamplingSettings:
    """Return how texts are drawn whose requests do not say it; a temperature of the user's counts above the model's."""
    own = pair.default_sampling(draws=True)
    return own if temperature is None else replace(own, temperature=temperature)
