"""Growth of token trees from a drafter's distributions. It knows no target.

Three engines grow trees, with one draft call a layer each. A policy is a small module with the values of nodes, and
`policies.py` is the table of policies.

- `best_first.py` draws children without replacement and takes the slots of largest gain (dyspec). It finds the tree of
  the token-by-token heap algorithm with a bound on children a node. A slot is decided on before its token is drawn;
  anything else would bias the output of sampled children.
- `beam.py` takes the best tokens under the text's noise, or of q, and keeps the best of all (adaptive, opt-tree,
  eagle2, c2t). Its policies are `BeamRule`s.
- `static.py` fills a shape that is known beforehand (sequoia, specinfer, mcsd, chain, files).

Beams of several texts grow as one (`batched.py`): the nodes of all trees lie in flat tensors with the number of their
text beside each, so a layer is a handful of operations however many texts there are. Texts of equal rules form a group.
Trees that tune themselves share a budget: a root for each text, then the best nodes of all trees (`selection.py`). A
size that the user gives is each text's own. Trees of sampled children share nothing, because texts depend on them.

What was looked up in text (`draft/lookup.py`) takes places of a beam's tree while it grows (`rivals.py`), and joins the
tree that a policy has grown (`merged.py`): the best nodes of both are the tree.

`acceptance.py` predicts which of a node's 32 best candidates the target takes, or none, for all of them together, so
that siblings compete.

docs/extending.md says how to add a policy.
"""

from collections.abc import Callable
from typing import TypeAlias

from edgespec.grow.beam import Beam
from edgespec.grow.growing import GrowthAlone
from edgespec.grow.merged import Merged
from edgespec.tree.token_tree import TokenTree

# The tree that a text is to have: there already, a beam, which grows with those of other texts, or one that grows
# alone; each of them also with what was looked up in text
Growth: TypeAlias = TokenTree | Beam | GrowthAlone | Merged
Grow: TypeAlias = Callable[[int, int], Growth]  # the root and most layers below it -> the tree to grow
