"""Growth of token trees from a drafter's distributions. It knows no target: what the target will say comes later."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

from torch import Tensor

from edgespec.draft.distributions import Distributions
from edgespec.tree.token_tree import TokenTree

# A tree that grows: it asks what follows tokens [k] below parent rows [k] of the drafter, and is sent q [k, vocab]
Growth: TypeAlias = Generator[tuple[Tensor, Tensor], Distributions, TokenTree]
