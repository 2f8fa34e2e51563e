"""The rule that is lossless for each kind of children."""

from __future__ import annotations

from collections.abc import Callable

import torch

from edgespec.config import SamplingSettings
from edgespec.tree.token_tree import Draw, TokenTree
from edgespec.verify import Acceptance
from edgespec.verify.greedy import verify_greedy
from edgespec.verify.membership import verify_membership
from edgespec.verify.rejection import verify_rejection
from edgespec.verify.rows import TargetRows


def verifier(sampling: SamplingSettings, draw: Draw) -> Callable[[TokenTree, TargetRows, torch.Generator], Acceptance]:
    """Return the rule for children that come about by `draw`."""
    if sampling.temperature == 0:
        return verify_greedy
    return verify_membership if draw == "top_k" else verify_rejection
