"""The rule that is lossless for each kind of children."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from edgespec.config import SamplingSettings
from edgespec.sampling.noise import TextNoise
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Verification
from edgespec.verify.rejection import verify_rejection
from edgespec.verify.rows import TargetRows
from edgespec.verify.walk import verify_coupled, verify_greedy, verify_membership

Verify: TypeAlias = Callable[[TokenTree, TargetRows, torch.Generator], Verification]


def verifier(sampling: SamplingSettings, draw: Draw, noise: TextNoise) -> Verify:
    """Return the rule for children that come about by `draw`.

    Only coupled children go with the text's noise: a rule of rejection that shared the draft's noise would be biased.
    """
    if sampling.temperature == 0:
        return verify_greedy
    if draw == "coupled":
        return lambda tree, rows, _generator: verify_coupled(tree, rows, noise)
    return verify_membership if draw == "chosen" else verify_rejection
