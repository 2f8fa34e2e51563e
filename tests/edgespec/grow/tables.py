"""Two models that are tables: random logits of every text, and a draft that is more or less like its target."""

import functools
from typing import Any

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode.sequence import Sequence, TextSettings
from edgespec.decode.start import start_sequence
from edgespec.grow.policies import open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling.distribution import to_draft_probs
from edgespec.sampling.noise import TextNoise
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from tests.support.table_models import RowOf, TableDrafter, TableTarget

CPU = torch.device("cpu")
VOCAB = 12
SHARPNESS = 2.0


@functools.lru_cache(maxsize=100_000)
def table_logits(seed: int, text: tuple[int, ...]) -> Tensor:
    """Return the logits [vocab] of a text, in float64: so exact that there are no ties."""
    generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**31)
    return SHARPNESS * torch.randn(VOCAB, generator=generator, dtype=torch.float64)


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """The nodes below the root as the tokens from the root's children down to each."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        assert 0 <= parent < len(paths), "parents come before their children"
        paths.append((*paths[parent], token))
    return paths[1:]


def target_logits(seed: int) -> RowOf:
    return lambda text: table_logits(seed, text)


def draft_logits(seed: int, *, likeness: float = 0.8) -> RowOf:
    """Logits that have so much in common with those of the target of that seed."""
    return lambda text: likeness * table_logits(seed, text) + (1 - likeness) * table_logits(seed + 1, text)


def session_of(
    tree: TreeSettings,
    sampling: SamplingSettings,
    *,
    target: RowOf,
    draft: RowOf,
    max_new_tokens: int,
    seed: int = 0,
    key: int = 0,
    text: dict[str, Any] | None = None,
    **options: Any,
) -> Sequence:
    """Return a session of tables, whose noise is that of the seed and the key; `text` are other settings of it."""
    settings = TextSettings(sampling=sampling, max_new_tokens=max_new_tokens, **(text or {}))
    draft_sampling = tree.draft_sampling(sampling)
    return start_sequence(
        TableTarget(target, vocab=VOCAB),
        TableDrafter(draft, lambda logits: to_draft_probs(logits, draft_sampling)),
        open_policy(tree),
        settings,
        TextDraws(
            sampling=sampling,
            device=CPU,
            generator=torch.Generator().manual_seed(seed),
            noise=TextNoise(seed=seed, key=key, vocab=VOCAB, device=CPU),
        ),
        **options,
    )
