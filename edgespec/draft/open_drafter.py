"""The drafter of a text: a language model's, or a feature head's."""

from __future__ import annotations

from edgespec.config import DraftSampling
from edgespec.draft.feature_head import FeatureHeadDrafter
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.model.text_cache import TextCache


def open_drafter(
    draft: CausalModel, target: Target, *, sampling: DraftSampling, cache: TextCache | None = None
) -> LanguageModelDrafter:
    """Return a drafter for the text of `target`, whose vocabulary counts; `sampling` is how children will be drawn."""
    if hasattr(draft.model, "fuse"):
        return FeatureHeadDrafter(draft, target.cache, vocab=target.vocab, sampling=sampling, cache=cache)
    return LanguageModelDrafter(draft, vocab=target.vocab, sampling=sampling, cache=cache)
