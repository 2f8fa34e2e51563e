"""The texts of an engine: those that wait, those under way, which share each pass, and the ways in which they end.

Nobody works in the background. Whoever waits for a text works on all of them, step by step, and the others who wait
are told; so threads may ask for texts at any time, and a text alone is a batch of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from edgespec.decode.adapt import Tuner
from edgespec.decode.batch import Batch, Outcome
from edgespec.decode.choose import start_session
from edgespec.decode.session import Session, TextSettings
from edgespec.decode.threads import ThreadTuner, with_threads
from edgespec.draft.open_drafter import open_drafter
from edgespec.errors import is_out_of_memory
from edgespec.grow.policies import OpenPolicy
from edgespec.model.causal_model import CausalModel
from edgespec.model.device import release_memory
from edgespec.model.target import Target
from edgespec.pair.pair import ModelPair
from edgespec.sampling.noise import TextNoise, generator_at, text_key
from edgespec.text.caches import KeptCaches, TextCaches, new_caches
from edgespec.text.handle import OnPrefill, TextHandle
from edgespec.text.prompt_cache import PromptCache
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult
from edgespec.text.watch import PassAbandonedError, watching
from edgespec.tree.settings import TreeSettings

SHARED_TOKENS = 16  # of a prompt that it pays to wait for, where another text reads the same one


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModels:
    """The models and the policy that a text is decoded with."""

    target: CausalModel
    draft: CausalModel | None  # None: plainly
    policy: OpenPolicy
    tuner: Tuner | None  # None: the policy's settings as they are

    @property
    def room(self) -> TreeSettings:
        """The largest trees that may grow."""
        return self.policy.settings if self.tuner is None else self.tuner.room


class Texts:
    """All texts that an engine was asked for and has not finished."""

    def __init__(
        self,
        pair: ModelPair,
        *,
        most: int,
        most_tokens: int,
        models: Callable[[TextRequest], TextModels],
        use_smaller: Callable[[], None],
        threads: ThreadTuner | None,
    ) -> None:
        """Have at most `most` texts under way, of at most `most_tokens` together; one is always let in.

        `models` says what a text is decoded with; `use_smaller` makes that smaller trees, because memory ran out.
        """
        self.most, self._most_tokens = most, most_tokens
        self.kept = KeptCaches()
        self.prompt_cache: PromptCache | None = None
        self._pair, self._models, self._use_smaller, self._threads = pair, models, use_smaller, threads
        self._condition = threading.Condition()
        self._is_driven = False
        self._abandons = False
        self._waiting: list[TextHandle] = []
        self._under_way: dict[Session, TextHandle] = {}
        self._draws: dict[TextHandle, tuple[torch.Generator, TextNoise]] = {}
        self._batch = Batch()

    def submit(
        self, request: TextRequest, *, reuse: bool = False, keeps: bool = True, on_prefill: OnPrefill | None = None
    ) -> TextHandle:
        """Ask for a text; it begins when there is room.

        With `reuse` it begins on rows that are kept of the prompt's beginning; with `keeps` its own are kept.
        """
        handle = TextHandle(request, self._pair, reuse=reuse, keeps=keeps, on_prefill=on_prefill, advance=self.advance)
        with self._condition:
            self._waiting.append(handle)
        return handle

    def finish_many(self, requests: Iterable[TextRequest]) -> Iterator[tuple[int, GenerationResult | Exception]]:
        """Yield the numbers and results of texts as they end, or errors; closing the iterator ends the others."""
        numbers = {self.submit(request, keeps=False): number for number, request in enumerate(requests)}
        try:
            while numbers:
                for handle in [handle for handle in numbers if handle.is_done]:
                    yield numbers.pop(handle), handle.error or handle.whole()
                if numbers:
                    self.advance()
        finally:
            for handle in numbers:
                handle.cancel()

    def tokens_of(self, requests: Sequence[TextRequest]) -> list[list[int]]:
        """Return the tokens of texts that share passes; raises what ended one of them."""
        handles = [self.submit(request, keeps=False) for request in requests]
        return [list(handle.result().token_ids) for handle in handles]

    def cancel(self, *, abandon: bool) -> None:
        """End all texts after their pass, or with `abandon` within it. A signal handler may call this."""
        for handle in [*self._waiting, *self._under_way.values()]:
            handle.is_cancelled = True
        self._abandons = abandon and self._is_driven

    def advance(self, wanted: TextHandle | None = None) -> int:
        """Make one step of all texts, or let another thread make it; nothing if `wanted` has something new by then.

        Returns the number of texts under way.
        """
        with self._condition:
            if wanted is not None and (wanted.has_unseen or wanted.is_done):
                return len(self._under_way)
            if self._is_driven:
                self._condition.wait()
                return len(self._under_way)
            self._is_driven = True
        try:
            self._step()
        finally:
            with self._condition:
                self._is_driven = self._abandons = False
                self._condition.notify_all()
        return len(self._under_way)

    def _step(self) -> None:
        self._let_go()
        self._admit()
        if not self._under_way:
            return
        try:
            outcomes = self._make_pass()
        except PassAbandonedError:
            for handle in list(self._under_way.values()):
                self._end(handle)
            return
        except Exception as error:
            self._recover(error)
            return
        out_of_memory = None
        for outcome in outcomes:
            handle = self._under_way[outcome.session]
            if outcome.step is not None:
                step = outcome.step
                goes_on = bool(handle.added)
                handle.take(replace(step, is_prefill=False) if goes_on and step.is_prefill else step)
                if handle.is_done:
                    self._end(handle)
            elif outcome.error is not None and is_out_of_memory(outcome.error):
                out_of_memory = outcome.error
            else:
                self._end(handle, outcome.error)
        if out_of_memory is not None:
            self._recover(out_of_memory)
        self._let_go()

    def _let_go(self) -> None:
        """End what was cancelled."""
        with self._condition:
            cancelled = [handle for handle in self._waiting if handle.is_cancelled]
            self._waiting = [handle for handle in self._waiting if not handle.is_cancelled]
        for handle in [*cancelled, *(text for text in list(self._under_way.values()) if text.is_cancelled)]:
            self._end(handle)

    def _admit(self) -> None:
        """Let waiting texts begin, as long as there is room: first those that go on from rows that are kept."""
        with self._condition:
            order = sorted(self._waiting, key=lambda handle: not (handle.reuse and self.kept.has(handle.request.ids)))
            for handle in order:
                if not self._has_room(handle):
                    break
                caches = self._caches_for(handle)
                if caches is not None:
                    self._waiting.remove(handle)
                    self._enter(handle, caches)
            self.kept.forget(max(0, len(self._under_way) + len(self.kept) - self.most))

    def _has_room(self, handle: TextHandle) -> bool:
        if not self._under_way:
            return True
        tokens = sum(text.request.num_tokens for text in (*self._under_way.values(), handle))
        return len(self._under_way) < self.most and tokens <= self._most_tokens

    def _caches_for(self, handle: TextHandle) -> TextCaches | None:
        """Return what a text begins on; None where it is better to wait until another has read the same prompt."""
        ids = handle.request.ids
        kept = self.kept.take(ids) if handle.reuse else None
        if kept is not None:
            return kept
        models = self._models(handle.request)
        if len(ids) > SHARED_TOKENS:
            for other in self._under_way.values():
                if other.request.ids == ids and other.caches is not None:
                    is_read = other.caches.shared(ids[:-1]) == len(ids) - 1
                    return other.caches.copy_of(ids[:-1]) if is_read else None
        begun = self.prompt_cache.begin(ids, models.target, models.draft) if self.prompt_cache is not None else None
        return begun or new_caches(models.target, models.draft)

    def _enter(self, handle: TextHandle, caches: TextCaches) -> None:
        """Begin a text, or go on with one behind the tokens that it has."""
        request, models = handle.request, self._models(handle.request)
        device = models.target.device
        if handle not in self._draws:
            generator = generator_at(request.seed, text_key(request.name), len(request.ids), device)
            self._draws[handle] = generator, request.noise(models.target.vocab, device)
        generator, noise = self._draws[handle]
        settings = TextSettings(
            sampling=request.sampling,
            max_new_tokens=request.max_new_tokens - len(handle.added),
            stop_tokens=self._pair.stop_tokens,
            grammar=request.grammar,
            num_logprobs=request.num_logprobs,
            num_written=len(handle.added),
        )
        target = Target(models.target, caches.target)
        drafter = None
        if models.draft is not None:
            tree = models.policy.settings
            drafter = open_drafter(
                models.draft, target, sampling=tree.draft_sampling(request.sampling), cache=caches.draft
            )
        session = start_session(target, drafter, models.policy, settings, generator, noise, tuner=models.tuner)
        handle.session, handle.caches = session, caches
        handle.start()
        self._under_way[session] = handle
        self._batch.enter(session, [*request.ids, *handle.added])

    def _end(self, handle: TextHandle, error: Exception | None = None) -> None:
        for session in [session for session, text in self._under_way.items() if text is handle]:
            del self._under_way[session]
            self._batch.leave(session)
        self._draws.pop(handle, None)
        if handle.caches is not None and error is None:
            handle.caches.target.truncate()
            if self.prompt_cache is not None:
                self.prompt_cache.keep(handle.caches)
            if handle.keeps:
                self.kept.keep(handle.caches, most=self.most)
        handle.caches = None
        if not handle.is_done:
            handle.end(error)

    def _make_pass(self) -> Sequence[Outcome]:
        models = self._models(next(iter(self._under_way.values())).request)
        watched = [models.target] if models.draft is None else [models.target, models.draft]
        with watching(watched, list(self._under_way.values()), lambda: self._abandons):
            return with_threads(self._batch.step, self._threads, reads=self._batch.num_reading > 0)

    def _recover(self, error: Exception) -> None:
        """Go on with smaller trees or fewer texts where memory ran out; else the error ends all texts under way."""
        texts = list(self._under_way.values())
        if is_out_of_memory(error):
            models = self._models(texts[0].request)
            if models.room.policy != "none" and any(handle.added for handle in texts):
                self._use_smaller()
                self._begin_again(texts, models.target.device)
                return
            if len(texts) > 1:
                self.most = len(texts) - 1
                youngest = texts.pop()
                self._withdraw(youngest)
                youngest.caches, youngest.state = None, "waiting"
                with self._condition:
                    self._waiting.insert(0, youngest)
                self._begin_again(texts, models.target.device)
                return
        for handle in texts:
            self._end(handle, error)

    def _begin_again(self, texts: Sequence[TextHandle], device: torch.device) -> None:
        """Let texts go on from the rows that they have, with what trees are now."""
        release_memory(device)
        for handle in texts:
            self._withdraw(handle)
        for handle in texts:
            assert handle.caches is not None
            self._enter(handle, handle.caches)

    def _withdraw(self, handle: TextHandle) -> None:
        assert handle.session is not None
        del self._under_way[handle.session]
        self._batch.leave(handle.session)
        handle.session = None
