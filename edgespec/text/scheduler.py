"""The texts of an engine: those that wait, those under way, which share each pass, and the ways in which they end.

Nobody works in the background. Whoever waits for a text works on all of them, step by step, and wakes the others who
wait; so threads may submit texts at any time, and a text alone is a batch of one.

An exception from outside, such as Ctrl-C's, may end a step at any place. What counts is what cannot be left half done:
the two lists of texts, and each text's pieces. The step after it makes everything else anew from these.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from edgespec.decode.batch import Outcome
from edgespec.decode.target_initialized import batch_of
from edgespec.decode.threaded_step import with_threads
from edgespec.errors import EdgespecError, is_out_of_memory
from edgespec.machine.device import release_memory
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.pair.pair import ModelPair
from edgespec.placement.cache_memory import most_kept_bytes
from edgespec.placement.load import LoadedModels, closed_engine
from edgespec.prefix_cache.in_memory import CacheBudget, PrefixCache
from edgespec.text.admission import TextModels, enter_batch, has_read, reader_of_prompt, reads_all, seen_by
from edgespec.text.between_layers import PassAbandonedError, watching
from edgespec.text.handle import HasNews, OnPrefill, TextHandle, WaitingTexts
from edgespec.text.request import TextRequest
from edgespec.text.step_lock import StepLock
from edgespec.text.trees import Trees
from edgespec.tuning.prompt_parts import PromptParts
from edgespec.tuning.step import StepResult
from edgespec.tuning.threads import ThreadTuner

NEXT_ROWS = 64  # that a step may add to a text


class Scheduler:
    """All texts of an engine that have not ended."""

    def __init__(
        self,
        pair: ModelPair,
        trees: Trees,
        loaded: LoadedModels,
        *,
        num_texts: int,
        max_tokens: int,
        threads: ThreadTuner | None,
    ) -> None:
        """Have at most `num_texts` texts under way, of at most `max_tokens` together; one is always let in."""
        self.num_texts, self._max_tokens, self._step_lock = num_texts, max_tokens, StepLock()
        self.prefix_cache = PrefixCache(self._step_lock.between_steps)
        self.prefix_cache.most_bytes = most_kept_bytes(loaded.placement, num_texts=num_texts)
        self._pair, self._trees, self._loaded, self._threads = pair, trees, loaded, threads
        self.num_cancels, self._process = 0, os.getpid()
        self._is_closed = False
        self._is_torn = False  # whether a step was begun and not ended
        # A text is put into the second before it is taken out of the first.
        self._waiting = WaitingTexts()
        self._under_way: list[TextHandle] = []
        self._on_pass: Callable[[float], None] = lambda _seconds: None
        self._parts = PromptParts(reads_once=not loaded.placement.is_resident)
        self._batch = batch_of(trees.settings)(self._parts)

    def submit(
        self, request: TextRequest, *, reuse: bool = False, keeps: bool = True, on_prefill: OnPrefill | None = None
    ) -> TextHandle:
        """Add a text; it begins when memory allows. Raises EdgespecError where the engine takes none.

        With `reuse` it begins on rows that are kept of the prompt's beginning; with `keeps` its own are kept.
        """
        self._check_process()
        if self._is_closed:
            raise closed_engine()
        handle = TextHandle(request, self._pair, reuse=reuse, keeps=keeps, on_prefill=on_prefill, advance=self.advance,
                            on_cancel=self._waiting.cancelled.append)  # fmt: skip
        self._waiting.add(handle)
        return handle

    def hear_passes(self, on_pass: Callable[[float], None]) -> None:
        """Have a function called with the seconds of each step of all texts, by the thread that made it."""
        self._on_pass = on_pass

    def cancel(self, *, abandon: bool) -> None:
        """End all texts after their pass, or with `abandon` within it. A signal handler may call this."""
        self.num_cancels += 1
        for handle in [*self._waiting, *self._under_way]:
            handle.cancel()
        self._step_lock.abandons = abandon and self._step_lock.is_taken

    def close(self) -> bool:
        """End all texts with an error, and take no more; a step of another thread is left between two layers.

        Returns False in a forked process, whose texts are another's.
        """
        if os.getpid() != self._process:
            return False
        self._step_lock.check()
        self._is_closed = True
        while self._waiting or self._under_way or self._step_lock.is_taken:
            self._step_lock.abandons = self._step_lock.is_taken
            self.advance()
        return True

    def advance(self, has_news: HasNews = lambda: False) -> int:
        """Make one step of all texts, or let another thread make it; nothing if there is news by then.

        Returns the number of texts under way. Raises EdgespecError within `on_prefill`, and in a forked process.
        """
        self._check_process()
        self._step_lock.take(partial(self._step, has_news))
        return len(self._under_way)

    def _step(self, has_news: HasNews) -> None:
        if has_news():
            return
        self._let_go()
        if self._is_torn:
            self._trees.forget_costs()
            if self._threads is not None:
                self._threads.forget()
            self._begin_again()
        self._is_torn = True
        self._admit()
        self.prefix_cache.fit(self._budget())
        if self._under_way:
            self._take_all(self._outcomes())
            self._let_go()
        self._is_torn = False

    def _outcomes(self) -> Sequence[Outcome]:
        """Make a pass, and return what it brought; nothing where it was left, or failed as a whole."""
        for handle in self._under_way:
            handle.begin_step()
        self._batch.others_wait = bool(self._waiting)
        self._look_ahead()
        watched = [self._loaded.target] + ([] if self._loaded.draft is None else [self._loaded.draft])
        try:
            with watching(watched, list(self._under_way), lambda: self._step_lock.abandons):
                started = time.perf_counter()
                found = with_threads(self._batch.step, self._threads, reads=self._batch.num_reading > 0)
            self._on_pass(time.perf_counter() - started)
            return found
        except PassAbandonedError:  # where nobody waited for its rows, the texts that did are cancelled already
            for handle in self._under_way if self._step_lock.abandons else ():
                handle.cancel()
        except Exception as error:
            self._recover(error)
        return ()

    def read_as(self, request: TextRequest) -> Sequence[int] | SeenPrompt:
        """Return a request's prompt as the target reads it."""
        return request.ids if request.pictures is None else seen_by(self._loaded, request.pictures)

    def _models(self, handle: TextHandle) -> TextModels:
        return self._trees.text_models(self._loaded, handle.request.sampling)

    def _take_all(self, outcomes: Sequence[Outcome]) -> None:
        """Give each text what the pass brought it."""
        handles = {handle.sequence: handle for handle in self._under_way}
        out_of_memory = None
        for outcome in outcomes:
            handle = handles.get(outcome.sequence)  # None: it ended since it failed, in a pass that was not made
            if outcome.error is not None and is_out_of_memory(outcome.error):
                out_of_memory = outcome.error
            elif handle is not None:
                self._take(handle, outcome.step, outcome.error)
        if out_of_memory is not None:
            self._recover(out_of_memory)

    def _take(self, handle: TextHandle, step: StepResult | None, error: Exception | None) -> None:
        """Give a text its step; whatever that raises ends this text alone."""
        if step is not None:
            try:
                handle.take(replace(step, is_prefill=False) if step.is_prefill and handle.added else step)
            except Exception as raised:
                error = raised
        if error is not None or handle.is_done:
            self._end(handle, error)

    def _let_go(self) -> None:
        """End what was cancelled, and what a callback of its own failed in; all texts of a closed engine."""
        closed = closed_engine() if self._is_closed else None
        if closed is not None:
            self._waiting.end_all(closed)
        self._waiting.end_cancelled()
        for handle in list(self._under_way):
            if handle.is_cancelled or handle.fault is not None or closed is not None:
                self._end(handle, handle.fault or closed)

    def _admit(self) -> None:
        """Let waiting texts begin, as long as memory allows: first those that go on from rows that are kept."""
        kind = batch_of(self._trees.settings)
        if not self._under_way and type(self._batch) is not kind:
            self._batch = kind(self._parts)
        first = self._waiting.first() if len(self._under_way) < self.num_texts else []
        self._look(first[: self.num_texts - len(self._under_way)])
        for handle in sorted(
            first, key=lambda text: not (text.reuse and self.prefix_cache.has(text.keys, text.request.adapters))
        ):
            if not self._has_room(handle):
                break
            caches = (
                self.prefix_cache.take(handle.keys, self._budget(handle), handle.request.adapters)
                if handle.reuse and not reads_all(handle)
                else None
            )
            reader = None if caches is not None else reader_of_prompt(handle, self._under_way)
            if reader is not None and not has_read(reader):
                continue
            self._under_way.append(handle)
            self._waiting.remove(handle)
            handle.caches = caches
            self._enter(handle, reader)
        sight = self._loaded.sight
        if sight is not None and sight.is_awake and not self._waiting.have_pictures:
            sight.rest()

    def _look(self, handles: Sequence[TextHandle]) -> None:
        """Let pictures of texts that may begin now pass the tower together; what fails is tried again with its text."""
        sight, seeing = self._loaded.sight, _unseen(handles)
        if sight is not None and len(seeing) > 1:
            with suppress(Exception):
                sight.look(seeing)

    def _look_ahead(self) -> None:
        """Let pictures of the texts that begin next pass the tower where this pass waits for weights."""
        sight = self._loaded.sight
        if sight is not None and sight.looks_ahead and (seeing := _unseen(self._waiting.first()[: self.num_texts])):
            sight.look_ahead(seeing)

    def _budget(self, *more: TextHandle) -> CacheBudget:
        """Return the memory for texts that are kept, beside those under way and such that are about to be."""
        texts = [*self._under_way, *more]
        tokens = sum(len(text.request.ids) + len(text.added) + NEXT_ROWS for text in texts)
        left = self._max_tokens - tokens if texts else self._max_tokens
        return CacheBudget(
            num_texts=self.num_texts - len(texts), num_tokens=left, allows_more=self.prefix_cache.allows_more
        )

    def _has_room(self, handle: TextHandle) -> bool:
        if not self._under_way:
            return True
        tokens = sum(text.num_tokens for text in (*self._under_way, handle))
        # Lossy trees, which have a loop of their own, wait for the texts of others, and others for theirs.
        is_of_loop = type(self._batch) is batch_of(self._trees.settings)
        return is_of_loop and len(self._under_way) < self.num_texts and tokens <= self._max_tokens

    def _enter(self, handle: TextHandle, reader: TextHandle | None = None) -> None:
        """Let a text go on after the tokens that it has; whatever that raises ends this text alone."""
        try:
            models = self._models(handle)
            sequence = enter_batch(self._batch, handle, models, reader=reader, stored=self.prefix_cache.files)
        except Exception as error:
            if len(self._under_way) > 1 and is_out_of_memory(error):
                self._put_off(handle)
            else:
                self._end(handle, error)
            return
        handle.sequence = sequence
        handle.start()

    def _end(self, handle: TextHandle, error: Exception | None = None) -> None:
        """End a text that was under way; its rows are kept, where it did not fail."""
        sequence, handle.sequence = handle.sequence, None
        if sequence is not None:  # also of a text that a stop string ended, of which the batch knows nothing
            self._batch.leave(sequence)
        caches, handle.caches = handle.caches, None
        handle.end(error)
        self._under_way.remove(handle)
        corpus = self._trees.corpus
        if corpus is not None and corpus.grows and handle.error is None:
            for part in handle.words():
                corpus.add(part)
        if caches is None or handle.error is not None:
            return
        caches.target.truncate()
        if self.prefix_cache.prompt_cache is not None:
            self.prefix_cache.prompt_cache.keep(caches)
        if handle.keeps:
            self.prefix_cache.keep(caches, num_prompt_tokens=min(len(handle.request.ids), len(caches.target.ids)))
            self.prefix_cache.fit(self._budget())

    def _recover(self, error: Exception) -> None:
        """Go on with smaller trees or fewer texts where memory ran out; else the error ends all texts under way."""
        texts = list(self._under_way)
        models = self._models(texts[0])
        has_trees = models.largest_tree.policy != "none" and any(handle.added for handle in texts)
        if not is_out_of_memory(error) or not (has_trees or len(texts) > 1):
            for handle in texts:
                self._end(handle, error)
            return
        self.prefix_cache.forget()
        self.prefix_cache.allows_more = False
        if has_trees:
            self._trees.use_smaller()
        else:
            self._put_off(texts[-1])
        release_memory(models.target.device)
        self._begin_again()

    def _put_off(self, handle: TextHandle) -> None:
        """Let a text wait until fewer are under way, because memory ran out."""
        self.num_texts = len(self._under_way) - 1
        if handle.sequence is not None:
            self._batch.leave(handle.sequence)
        handle.caches, handle.state = None, "waiting"
        self._waiting.add_first(handle)
        self._under_way.remove(handle)

    def _begin_again(self) -> None:
        """Let the texts go on after the tokens that they have, with the trees of now."""
        self._batch = batch_of(self._trees.settings)(self._parts)
        for handle in list(self._under_way):
            handle.begin_again()
            self._waiting.remove(handle)  # where it was about to be taken out, or put off
            if handle.is_done:
                self._end(handle)
            else:
                self._enter(handle)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            what = "the engine was loaded before this process was forked, and its threads are not here."
            raise EdgespecError("E_ENGINE", what, "Load an engine in this process, or start processes by 'spawn'.")


def _unseen(handles: Sequence[TextHandle]) -> list[PicturePrompt]:
    """Return the prompts that have pictures, of which the decoder does not know yet what it gets."""
    prompts = [handle.request.pictures for handle in handles if handle.seen is None]
    return [prompt for prompt in prompts if prompt is not None]
