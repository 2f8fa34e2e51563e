"""One draft call for the trees of all texts."""

from collections import abc

from edgespec.draft.block import BlockDrafter, expand_blocks
from edgespec.draft.distributions import Distributions
from edgespec.draft.language_model import LanguageModelDrafter, expand_batched
from edgespec.errors import EdgespecError
from edgespec.grow.batched import Expansion, one_by_one


def expand(expansions: abc.Sequence[Expansion]) -> abc.Sequence[Distributions | EdgespecError]:
    """Expand the drafts of all texts at once where they are one model."""
    blocks = [(drafter, tokens, rows) for drafter, tokens, rows in expansions if isinstance(drafter, BlockDrafter)]
    if len(blocks) == len(expansions):
        return expand_blocks(blocks)
    models = [drafter for drafter, _, _ in expansions if isinstance(drafter, LanguageModelDrafter)]
    if len(models) == len(expansions):
        return expand_batched(
            [(drafter, tokens, rows) for drafter, (_, tokens, rows) in zip(models, expansions, strict=True)]
        )
    return one_by_one(expansions)
