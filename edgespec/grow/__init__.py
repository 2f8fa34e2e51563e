"""Growth of token trees from a drafter's distributions. It knows no target: what the target will say comes later."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

from edgespec.draft.distributions import Distributions
from edgespec.grow.beam import Beam
from edgespec.grow.growing import Asked
from edgespec.tree.token_tree import TokenTree

# A tree that grows: it asks for q [k, vocab] of some nodes again and again, or once for the tree of a beam, which
# grows with those of other texts
Growth: TypeAlias = Generator[Asked | Beam, Distributions | TokenTree, TokenTree]
