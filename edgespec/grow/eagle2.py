"""EAGLE-2: expand the k best of each layer, then rerank all candidates; with Dynamic Depth Decoding's stop.

Source: EAGLE-2 (Li et al. 2024), sections 4.1 and 4.2, as C2T's section 2.2 states it. Dynamic Depth
Decoding (Brown et al. 2024): at chosen depths, stop when the log of the beam's summed path
probabilities is below a threshold.
"""

from edgespec.grow.beam import BeamRule, by_path_probability


def eagle2_rule(
    *, width: int, stop_depths: frozenset[int] = frozenset(), stop_log_probability: float = 0.0
) -> BeamRule:
    """Return the rule for beams of `width`; without `stop_depths` every tree has the full depth."""
    return BeamRule(
        score=by_path_probability, layer_expanded=width, stop_depths=stop_depths, stop_log_score=stop_log_probability
    )
