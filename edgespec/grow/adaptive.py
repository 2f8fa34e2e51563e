"""Adaptive trees (ours): best-first by measured acceptance, selected by expected gain.

Sampled children are selected by s times the acceptance expected before the slot's token is drawn;
chosen children by V, the product of measured acceptances along the path. The model and what it was
fitted on are in `acceptance.py`.
"""

from __future__ import annotations

from torch import Tensor

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.beam import BeamRule
from edgespec.grow.best_first import PredictSlots
from edgespec.grow.growing import Layer
from edgespec.sampling import entropy_of_top


def adaptive_slots(model: AcceptanceModel, *, temperature: float) -> PredictSlots:
    """Return the prediction for sampled children; `temperature` is the target's."""

    def predict(layer: Layer) -> tuple[Tensor, Tensor]:
        entropy, top_q, mass_left = entropy_of_top(layer.q), layer.q.amax(-1), layer.mass_left
        acceptance = model.token_acceptance(
            draw="without_replacement",
            q=layer.q_drawn,
            mass_left=mass_left,
            entropy=entropy,
            top_q=top_q,
            depth=layer.depth,
            temperature=temperature,
        )
        expected = model.slot_acceptance(
            mass_left=mass_left, entropy=entropy, top_q=top_q, depth=layer.depth, temperature=temperature
        )
        return acceptance, expected

    return predict


def adaptive_rule(model: AcceptanceModel, *, temperature: float, threshold: float, stop_gain: float = 0.0) -> BeamRule:
    """Return the rule for chosen children: their score is V, which must be at least `threshold`.

    No layer follows one that adds less than `stop_gain` to the sum of V.
    """

    def score(layer: Layer) -> Tensor:
        acceptance = model.token_acceptance(
            draw="top_k",
            q=layer.q_drawn,
            mass_left=layer.mass_left,
            entropy=entropy_of_top(layer.q),
            top_q=layer.q.amax(-1),
            depth=layer.depth,
            temperature=temperature,
        )
        return layer.values[:, None] * acceptance

    stops = (lambda outcome: outcome.gain < stop_gain) if stop_gain > 0 else None
    return BeamRule(score=score, threshold=threshold, stops=stops)
