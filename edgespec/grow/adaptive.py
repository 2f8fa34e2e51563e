"""Adaptive trees (ours): the best nodes by measured acceptance, of coupled children.

A node's score is V, the product of measured acceptances along its path: the chance that the text goes through it. The
acceptances of a node's candidates are predicted together. The model and what it was fitted on are in `acceptance.py`.
"""

from __future__ import annotations

from torch import Tensor

from edgespec.grow.acceptance import NUM_CANDIDATES, AcceptanceModel, candidates_of
from edgespec.grow.beam import BeamRule
from edgespec.grow.growing import Layer


def adaptive_rule(model: AcceptanceModel, *, temperature: float, threshold: float, stop_gain: float = 0.0) -> BeamRule:
    """Return the rule for trees of nodes whose V is at least `threshold`; `temperature` is the target's.

    No layer follows one that adds less than `stop_gain` to the sum of V.
    """

    def score(layer: Layer) -> Tensor:
        noise = None if layer.noise is None else layer.noise[layer.drawn]  # [k, c]
        depth = layer.values.new_full((1, 1), layer.depth)
        candidates = candidates_of(
            layer.draft_q, layer.drawn, layer.q_drawn, noise, depth=depth, temperature=temperature
        )
        return layer.values[:, None] * model.candidate_acceptance(candidates)

    stops = (lambda outcome: outcome.gain < stop_gain) if stop_gain > 0 else None
    return BeamRule(score=score, num_candidates=NUM_CANDIDATES, threshold=threshold, stops=stops)
