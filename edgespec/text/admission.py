"""How a text begins, or continues after the tokens that it has: the rows that it starts from, and its sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.decode.sequence import Sequence
from edgespec.decode.start import start_sequence
from edgespec.draft.feature_head import open_drafter
from edgespec.errors import EdgespecError
from edgespec.grow.text_draws import TextDraws
from edgespec.model.seeing import refused
from edgespec.model.seen_prompt import SeenPrompt, words_of
from edgespec.model.target import Target
from edgespec.prefix_cache.caches import TextCaches, new_caches
from edgespec.sampling.noise import generator_at, text_key
from edgespec.text.request import check_ids

if TYPE_CHECKING:
    from edgespec.decode.batch import Batch
    from edgespec.grow.policies import OpenPolicy
    from edgespec.model.causal_model import CausalModel
    from edgespec.model.picture_prompt import PicturePrompt
    from edgespec.model.sight import Sight
    from edgespec.placement.load import LoadedModels
    from edgespec.prefix_cache.prompt_cache import PromptCache
    from edgespec.prefix_cache.slots import Slots
    from edgespec.text.handle import TextHandle
    from edgespec.tree.settings import TreeSettings
    from edgespec.tuning.lookup_choice import LookupSource
    from edgespec.tuning.tuner import Tuner
    from edgespec.verify.near_ties import NearTies

SHARED_TOKENS = 16  # of a prompt that it pays to wait for, where another text reads the same one


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModels:
    """The models and the policy that a text is decoded with."""

    target: CausalModel
    draft: CausalModel | None  # None: plainly
    policy: OpenPolicy
    tuner: Tuner | None  # None: the policy's settings as they are
    lookup: LookupSource | None = None  # None: nothing is looked up in text
    draft_is_copy: bool = False  # of the target itself, which sees what the target sees
    sight: Sight | None = None  # of the target; None where its family's own passes decode
    near_ties: NearTies | None = None  # where rows that are read as in plain decoding decide them

    @property
    def largest_tree(self) -> TreeSettings:
        """The largest trees that may grow."""
        return self.policy.settings if self.tuner is None else self.tuner.largest_tree


def reader_of_prompt(handle: TextHandle, under_way: Iterable[TextHandle]) -> TextHandle | None:
    """Return another text with the same long prompt, whose rows are worth waiting for."""
    keys = handle.keys
    if len(keys) <= SHARED_TOKENS or reads_all(handle):
        return None
    asked = (keys, handle.request.adapters)
    same = (other for other in under_way if (other.keys, other.request.adapters) == asked)
    return next((other for other in same if other.caches is not None), None)


def reads_all(handle: TextHandle) -> bool:
    """Return whether all rows of a text's prompt have to pass the model: each is scored, or none may be cached."""
    is_read = handle.request.num_prompt_logprobs is not None or not handle.request.cache_prompt
    return is_read and not handle.added


def has_read(reader: TextHandle) -> bool:
    """Return whether a text has the rows of its prompt."""
    keys = reader.keys
    return reader.caches is not None and reader.caches.shared(keys, reader.request.adapters) == len(keys)


def enter_batch(
    batch: Batch,
    handle: TextHandle,
    models: TextModels,
    *,
    reader: TextHandle | None,
    stored: PromptCache | Slots | None,
) -> Sequence:
    """Let a text share the batch's passes, after the tokens that it has, and return its sequence.

    It begins on another's rows of the same prompt, on those of a file, or on none.
    """
    keys = handle.keys
    if reads_all(handle):
        handle.caches, reader, stored = None, None, None
    if handle.caches is None and reader is not None and reader.caches is not None:
        handle.caches = reader.caches.copy_of(keys)
    if handle.caches is None and stored is not None:
        handle.caches = stored.begin(keys, models.target, models.draft, handle.request.adapters)
    handle.caches = handle.caches or new_caches(models.target, models.draft, handle.request.adapters)
    sequence = open_sequence(handle, handle.caches, models)
    batch.enter(sequence, [*handle.request.ids, *handle.added])
    return sequence


def seen_by(models: TextModels | LoadedModels, pictures: PicturePrompt) -> SeenPrompt:
    """Return what the target's decoder gets of a prompt with pictures; raises EdgespecError where none are read."""
    if models.sight is None:
        raise refused(models.target.model.config, "its family is decoded by its own passes, which read words alone")
    return models.sight.see(pictures)


def open_sequence(handle: TextHandle, caches: TextCaches, models: TextModels) -> Sequence:
    """Return the sequence for what a text has not written yet; raises EdgespecError for ids that the target lacks."""
    request, device = handle.request, models.target.device
    words = request.ids if request.pictures is None else words_of(request.pictures)
    check_ids(words, models.target.num_embeddings)  # a request may be of another engine
    if request.pictures is not None and handle.seen is None:
        handle.seen = seen_by(models, request.pictures)
    if request.num_prompt_logprobs is not None and models.target.is_plain:
        what = "this model's family is decoded by its own passes, which say nothing of a prompt's tokens."
        raise EdgespecError("E_SETTING", what, "Leave `prompt_logprobs` out.")
    if handle.draws is None:
        generator = generator_at(request.seed, text_key(request.name), len(request.ids) + len(request.begun), device)
        handle.draws = generator, request.noise(models.target.vocab, device)
    generator, noise = handle.draws
    settings = request.settings(num_written=len(handle.added))
    target = Target(models.target, caches.target)
    target.seen = handle.seen
    drafter = None
    if models.draft is not None:
        sampling = models.policy.settings.draft_sampling(request.sampling)
        drafter = open_drafter(
            models.draft, target, sampling=sampling, cache=caches.draft, is_copy=models.draft_is_copy
        )
    draws = TextDraws(sampling=request.sampling, device=device, generator=generator, noise=noise)
    sequence = start_sequence(
        target, drafter, models.policy, settings, draws,
        tuner=models.tuner, lookup=models.lookup,
    )  # fmt: skip
    sequence.near_ties = models.near_ties
    return sequence
