"""Trees of many texts grow together: each round asks the draft once, for the next layer of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from edgespec.draft import Drafter
from edgespec.draft.distributions import Distributions
from edgespec.errors import EdgespecError
from edgespec.grow import Growth
from edgespec.tree.token_tree import TokenTree

Expansion = tuple[Drafter, Tensor, Tensor]  # tokens [k], rows of their parents [k]
# Returns q [k, vocab] of every expansion, or what went wrong with it
ExpandTogether = Callable[[Sequence[Expansion]], Sequence[Distributions | EdgespecError]]


@dataclass(frozen=True, slots=True)
class Grow:
    """A policy at work on one text."""

    steps: Callable[[int, int, Tensor | None], Growth]  # root, most layers, the root's children if given [w]
    drafter: Drafter | None  # None: trees are roots only

    def growth(self, root: int, max_depth: int, branches: Tensor | None = None) -> Growth:
        """Return the growth of the tree below a root token, of at most so many layers."""
        return self.steps(root, max_depth, branches)

    def __call__(self, root: int, max_depth: int, branches: Tensor | None = None) -> TokenTree:
        """Return the tree, grown alone."""
        return grown(self.growth(root, max_depth, branches), self.drafter)


def grown(growth: Growth, drafter: Drafter | None) -> TokenTree:
    """Return one tree, grown alone."""
    try:
        asked = next(growth)
        while True:
            assert drafter is not None
            asked = growth.send(drafter.expand(*asked))
    except StopIteration as end:
        tree: TokenTree = end.value
        return tree


def one_by_one(expansions: Sequence[Expansion]) -> list[Distributions | EdgespecError]:
    """Expand each by itself, for drafters that have nothing in common."""
    found: list[Distributions | EdgespecError] = []
    for drafter, tokens, parent_rows in expansions:
        try:
            found.append(drafter.expand(tokens, parent_rows))
        except EdgespecError as error:
            found.append(error)
    return found


def grow_together(
    growths: Sequence[tuple[Growth, Drafter | None]], expand: ExpandTogether
) -> list[TokenTree | EdgespecError]:
    """Return the trees of all texts, or what went wrong with one: the others grow on."""
    found: dict[int, TokenTree | EdgespecError] = {}
    answers: dict[int, Distributions | EdgespecError | None] = dict.fromkeys(range(len(growths)))
    while answers:
        asked: dict[int, Expansion] = {}
        for index, answer in answers.items():
            growth, drafter = growths[index]
            if isinstance(answer, EdgespecError):
                growth.close()
                found[index] = answer
                continue
            try:
                tokens, parent_rows = next(growth) if answer is None else growth.send(answer)
            except StopIteration as end:
                found[index] = end.value
            except EdgespecError as error:
                found[index] = error
            else:
                assert drafter is not None
                asked[index] = drafter, tokens, parent_rows
        answers = dict(zip(asked, expand(list(asked.values())), strict=True)) if asked else {}
    return [found[index] for index in range(len(growths))]
