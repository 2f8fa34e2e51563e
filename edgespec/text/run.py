"""One text is decoded as asked: the models' caches, the loop, its text, and the ways in which it ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from tokenizers.decoders import DecodeStream

from edgespec.decode.adapt import Tuner
from edgespec.decode.choose import continue_text, start_session
from edgespec.decode.session import TextSettings
from edgespec.decode.step import StepResult
from edgespec.decode.threads import ThreadTuner, with_threads
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.draft.open_drafter import open_drafter
from edgespec.errors import is_out_of_memory
from edgespec.grow.policies import OpenPolicy
from edgespec.model.causal_model import CausalModel
from edgespec.model.device import release_memory
from edgespec.model.layer_major import Watch
from edgespec.model.target import Target
from edgespec.pair.pair import ModelPair
from edgespec.placement.memory import cache_rows
from edgespec.sampling.noise import TextNoise, generator_at, text_key
from edgespec.text.cancel import PassAbandonedError, Running
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult, TextChunk
from edgespec.text.stops import text_chunks
from edgespec.tree.settings import TreeSettings

OnPrefill = Callable[[int, int], None]  # tokens of the prompt that are read, of how many that were not cached


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModels:
    """The models and the policy that a text is decoded with."""

    target: CausalModel
    draft: CausalModel | None  # None: plainly
    policy: OpenPolicy
    tuner: Tuner | None  # None: the policy's settings as they are
    max_context: int
    with_smaller_trees: Callable[[], TextModels]  # asked where memory runs out
    threads: ThreadTuner | None = None  # None: their number is settled

    @property
    def room(self) -> TreeSettings:
        """The largest trees that may grow."""
        return self.policy.settings if self.tuner is None else self.tuner.room


def run_text(
    models: TextModels,
    request: TextRequest,
    pair: ModelPair,
    running: Running,
    *,
    reuse: bool,
    on_prefill: OnPrefill | None,
) -> Generator[TextChunk, None, None]:
    """Yield the steps of a text with what they add to it; an interrupted text ends with an unfinished step.

    With `reuse`, the rows that the caches hold of the prompt's beginning stay.
    """
    decoder = DecodeStream(skip_special_tokens=True)
    backend = pair.tokenizer.backend_tokenizer

    def spell(token: int) -> str:
        # What ends a text is no part of it, also where it is not special to the tokenizer.
        return "" if token in pair.stop_tokens else decoder.step(backend, token) or ""

    steps = _steps(models, request, pair, reuse=reuse)
    chunks = text_chunks(steps, decode=spell, stop=request.stop)
    with running.text(), _watched(models, request, running, on_prefill) as watch:
        try:
            for chunk in chunks:
                models.target.watch = watch  # the prompt is read
                yield chunk
                if running.is_stopping:
                    return
        except PassAbandonedError:
            return
        finally:
            steps.close()  # now, and not when somebody collects it: the next text uses the same caches


def finished(request: TextRequest, chunks: Sequence[TextChunk], pair: ModelPair, *, total_s: float) -> GenerationResult:
    """Return all chunks of a text as one result."""
    token_ids = tuple(token for chunk in chunks for token in chunk.step.tokens)
    spelled = [token for token in token_ids if token not in pair.stop_tokens]
    finish = chunks[-1].step.finish if chunks else None
    return GenerationResult(
        text=(
            "".join(chunk.text for chunk in chunks)
            if request.stop
            else str(pair.tokenizer.decode(spelled, skip_special_tokens=True))
        ),
        token_ids=token_ids,
        finish_reason={"length": request.limited_by, "stop": "stop"}[finish] if finish else "interrupted",
        prompt_tokens=len(request.ids),
        seed=request.seed,
        sampling=request.sampling,
        steps=tuple(chunk.step for chunk in chunks),
        total_s=total_s,
    )


def _steps(
    models: TextModels, request: TextRequest, pair: ModelPair, *, reuse: bool
) -> Generator[StepResult, None, None]:
    """Yield the text's steps.

    Where memory runs out in a pass, the pass is made again with smaller trees, then without any.
    """
    device = models.target.device
    generator = generator_at(request.seed, text_key(request.name), len(request.ids), device)
    noise = request.noise(models.target.vocab, device)
    added: list[int] = []
    while True:
        try:
            for step in _steps_behind(added, models, request, pair, generator, noise, reuse=reuse):
                added += step.tokens
                yield step
            return
        except Exception as error:
            if not is_out_of_memory(error) or not added or models.room.policy == "none":
                raise
        # Behind the handler: until then the error keeps what the pass had allocated.
        release_memory(device)
        models = models.with_smaller_trees()


def _steps_behind(
    added: list[int],
    models: TextModels,
    request: TextRequest,
    pair: ModelPair,
    generator: torch.Generator,
    noise: TextNoise,
    *,
    reuse: bool,
) -> Iterator[StepResult]:
    """Yield the steps behind the prompt and the tokens that were `added` to it before.

    After each step the caches hold all tokens but the last.
    """
    goes_on = bool(added)
    target = Target(models.target, keeps_text=reuse or goes_on)
    # Caches that are kept get their final size at once: growing later would need both sizes for a moment.
    rows = models.max_context if reuse else len(request.ids) + request.max_new_tokens
    settings = TextSettings(
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens - len(added),
        stop_tokens=pair.stop_tokens,
        cache_rows=cache_rows(rows, models.room),
    )
    drafter = _drafter(models, request, reuse=reuse or goes_on)
    session = start_session(target, drafter, models.policy, settings, generator, noise, tuner=models.tuner)
    prompt = torch.tensor([*request.ids, *added], device=models.target.device)
    steps = with_threads(continue_text(session, prompt, models.policy), models.threads)
    for step in steps:
        if goes_on:
            yield replace(step, is_prefill=False)
        else:
            yield replace(step, num_cached=target.num_kept) if step.is_prefill else step


def _drafter(models: TextModels, request: TextRequest, *, reuse: bool) -> LanguageModelDrafter | None:
    if models.draft is None:
        return None
    tree = models.policy.settings
    return open_drafter(
        models.draft,
        models.target,
        sampling=tree.draft_sampling(request.sampling),
        tree_rows=models.room.num_drafted,
        keeps_text=reuse,
    )


@contextmanager
def _watched(
    models: TextModels, request: TextRequest, running: Running, on_prefill: OnPrefill | None
) -> Iterator[Watch]:
    """Within this block every layer is a place to leave the pass; yields the watch of the target's later passes."""

    def watch(_share: float) -> None:
        running.check_pass()

    def watch_prefill(share: float) -> None:
        running.check_pass()
        if on_prefill:
            new = len(request.ids) - len(models.target.text)  # the kept rows; the others follow when all are read
            on_prefill(round(share * new), new)

    watched = [model for model in (models.target, models.draft) if model is not None]
    try:
        for model in watched:
            model.watch = watch
        models.target.watch = watch_prefill
        yield watch
    finally:
        for model in watched:
            model.watch = None
