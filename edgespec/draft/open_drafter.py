"""The drafter of a loaded draft: a language model's, or a feature head's."""

from __future__ import annotations

from edgespec.config import DraftSampling
from edgespec.draft.feature_head import FeatureHeadDrafter
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.model.causal_model import CausalModel


def open_drafter(
    draft: CausalModel,
    target: CausalModel,
    *,
    sampling: DraftSampling,
    tree_rows: int,
    keeps_text: bool = False,
) -> LanguageModelDrafter:
    """Return a drafter for `target`, whose vocabulary counts; `sampling` is how children will be drawn."""
    if hasattr(draft.model, "fuse"):
        return FeatureHeadDrafter(
            draft, target, vocab=target.vocab, sampling=sampling, tree_rows=tree_rows, keeps_text=keeps_text
        )
    return LanguageModelDrafter(
        draft, vocab=target.vocab, sampling=sampling, tree_rows=tree_rows, keeps_text=keeps_text
    )
