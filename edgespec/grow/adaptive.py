"""Adaptive trees (ours): the best nodes by measured acceptance, of coupled children.

A node's score is V, the product of measured acceptances along its path: the chance that the text goes through it. The
acceptances of a node's candidates are predicted together. The model and what it was fitted on are in `acceptance.py`.
"""

from dataclasses import dataclass

from torch import Tensor

from edgespec.grow.acceptance import NUM_CANDIDATES, AcceptanceModel, columns, read_of
from edgespec.grow.beam import BeamRule, Candidates
from edgespec.grow.growing import Drawn


def adaptive_rule(model: AcceptanceModel) -> BeamRule:
    """Return the rule that values nodes by V."""
    return BeamRule(score=_Score(model), read=_read, num_candidates=NUM_CANDIDATES)


@dataclass(frozen=True, slots=True)
class _Score:
    model: AcceptanceModel

    def __call__(self, layer: Candidates) -> Tensor:
        depth = layer.values.new_full((1, 1), layer.depth)
        candidates = columns(layer.q_drawn, layer.read, depth=depth, temperature=layer.temperature[:, None])
        return layer.values[:, None] * self.model.candidate_acceptance(candidates)


def _read(layer: Drawn) -> tuple[Tensor, ...]:
    noise = None if layer.noise is None else layer.noise[layer.drawn]  # [k, c]
    return read_of(layer.draft_q, layer.drawn, layer.q_drawn, noise)
