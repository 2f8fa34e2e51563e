"""How the children of a text's trees are drawn."""

from dataclasses import dataclass

import torch

from edgespec.config import SamplingSettings
from edgespec.sampling.noise import TextNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDraws:
    """What draws are made from; all trees of a text share it."""

    sampling: SamplingSettings
    device: torch.device
    generator: torch.Generator  # of sampled children
    noise: TextNoise  # of coupled children
    keeps_draft_probs: bool = False  # in all trees, for records: the rule may not need q

    @property
    def shared_noise(self) -> TextNoise | None:
        """The noise of coupled children; None at temperature 0, where the target draws without any."""
        return self.noise if self.sampling.temperature > 0 else None
