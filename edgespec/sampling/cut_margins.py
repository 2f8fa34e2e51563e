"""How far logits may move before truncation leaves a token out, or takes it in."""

import math

import torch
from torch import Tensor

from edgespec.config import SamplingSettings

RULED_OUT = -1e30  # a logit of no probability, with which margins can be reckoned
WHOLE_MASS = 1 - 1e-12


def cut_margins(logits: Tensor, sampling: SamplingSettings) -> Tensor:
    """Return how far finite logits [vocab] must move for each token to be cut off: [vocab], below 0 where it is."""
    margins = torch.full_like(logits, torch.inf)
    if sampling.temperature == 0 or not sampling.truncates:
        return margins
    vocab, temperature = logits.shape[0], sampling.temperature
    best, order = logits.sort(descending=True)
    most = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    if most < vocab:
        margins = torch.where(logits >= best[most - 1], logits - best[most], logits - best[most - 1])
    if sampling.top_p < 1:
        p = (best / temperature).softmax(-1)
        mass_before = (p.cumsum(-1) - p) / p[:most].sum()
        mass_before = mass_before.clamp(max=min(float(mass_before[most - 1]), WHOLE_MASS))
        # A change of logits changes the log odds of a mass by as much, over the temperature.
        odds = torch.tensor(sampling.top_p, dtype=torch.float64).logit() - mass_before.logit()
        margins = torch.minimum(margins, torch.empty_like(odds).scatter_(0, order, temperature * odds))
    if sampling.min_p > 0:
        margins = torch.minimum(margins, logits - best[0] - temperature * math.log(sampling.min_p))
    return margins
