"""Near ties: choices that rounding may turn, because the next best token is nearer than logits were seen to move.

Where numbers have few bits, a row's logits depend on the number of rows that pass a layer with it. `NearTies` measures
by how much: each text whose choice is a near tie is read again row by row, as plain decoding reads it, and both rows
are compared. A choice by a wider margin is plain decoding's, whatever rows were beside it.
"""

import math

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.sampling.cut_margins import RULED_OUT, cut_margins

SAFETY = 2.0  # times the largest change that was seen: a bound for those that come
LEAST_MEASURED = 8  # rows of passes of about as many rows, before which every choice is read again
LIKELY = 256  # tokens whose logits are compared: what is far below them is never chosen
MOST_UNREAD = 256  # of a text's last rows, before which a choice is read again whatever its margin: errors add up


class NearTies:
    """How far the logits of a run move with the rows beside them, and which choices are nearer than that."""

    def __init__(self) -> None:
        self.largest_change = 0.0  # of the difference between two logits of a row
        self._num_measured: dict[int, int] = {}  # rows, by the logarithm of the number of rows in their pass

    @property
    def margin(self) -> float:
        """The distance of two logits below which a choice is a near tie."""
        return SAFETY * self.largest_change

    def learn(self, among: Tensor, alone: Tensor, *, num_rows: int) -> None:
        """Compare logits [k, vocab] of rows that passed among `num_rows` with those of the same rows alone."""
        likely = alone.float().topk(min(LIKELY, alone.shape[1]), -1).indices
        change = among.float().gather(1, likely) - alone.float().gather(1, likely)
        self.largest_change = max(self.largest_change, float((change.amax(1) - change.amin(1)).max()))
        size = num_rows.bit_length()
        self._num_measured[size] = self._num_measured.get(size, 0) + among.shape[0]

    def is_near(
        self, logits: Tensor, token: int, sampling: SamplingSettings, e_to_g: Tensor | None, *, num_rows: int
    ) -> bool:
        """Return whether another token than the chosen one may be right, by logits [1, vocab] as they are drawn from.

        `e_to_g` is the noise [vocab] that decides above temperature 0; the row passed among `num_rows`.
        """
        if self._num_measured.get(num_rows.bit_length(), 0) < LEAST_MEASURED:
            return True
        own = logits[0].double().clamp(min=RULED_OUT)
        # A penalty multiplies what rounding has changed.
        margin = self.margin * max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
        if margin == 0:
            return False
        scores, may_stay = own, own > RULED_OUT
        if sampling.temperature > 0:
            assert e_to_g is not None
            scores = own + sampling.temperature * e_to_g.double().log()
            if sampling.truncates:
                margins = cut_margins(own, sampling)
                stays = margins >= 0
                if not bool(stays[token]):
                    return True
                # What is next to the edge may change places with it, and a mass then ends elsewhere.
                last_kept, first_cut = own[stays].min(), torch.where(stays, -math.inf, own).max()
                if float(torch.minimum(margins[token], own[token] - first_cut)) < margin:
                    return True
                may_stay &= (margins > -margin) | (own > last_kept - margin)
        others = torch.where(may_stay, scores, -math.inf)
        others[token] = -math.inf
        return float(scores[token] - others.max()) < margin
