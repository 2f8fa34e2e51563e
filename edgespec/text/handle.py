"""A text that an engine decodes: its pieces as they come, its end, and how it is cancelled.

Many texts may wait for their turn: no step looks at all of them.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch

from edgespec.decode.sequence import Sequence
from edgespec.model.seen_prompt import SeenPrompt, without_pictures
from edgespec.pair.pair import ModelPair
from edgespec.sampling.noise import TextNoise
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult, TextChunk
from edgespec.text.stops import TextPieces
from edgespec.text.token_text import TokenText, text_of_tokens
from edgespec.tuning.step import StepResult

if TYPE_CHECKING:
    from edgespec.prefix_cache.caches import TextCaches

OnPrefill = Callable[[int, int], None]  # tokens of the prompt that are read, of how many that were not cached
HasNews = Callable[[], bool]  # whether a step has brought what is waited for
State = Literal["waiting", "under way", "done"]
MAX_FIRST = 64  # waiting texts that one step chooses from


class TextHandle:
    """One text, from its request on. Any thread may iterate over it, wait for it or cancel it.

    How far a text is stands in the pieces alone: a step's piece is there or not, wherever an interrupt falls, and
    `begin_again` makes all else anew from them.
    """

    def __init__(
        self,
        request: TextRequest,
        pair: ModelPair,
        *,
        reuse: bool,
        keeps: bool,
        on_prefill: OnPrefill | None,
        advance: Callable[[HasNews], object],
        on_cancel: Callable[[TextHandle], object],
    ) -> None:
        """Wait for its turn; `advance` works on the engine's texts, unless there is news by then."""
        self.request, self.reuse, self.keeps, self.on_prefill = request, reuse, keeps, on_prefill
        self.num_tokens = request.num_tokens
        self.keys = request.keys  # the prompt's ids, as rows are kept by them
        self.seen: SeenPrompt | None = None  # what the target's decoder gets of a prompt with pictures
        self.state: State = "waiting"
        self.error: Exception | None = None
        self.fault: Exception | None = None  # of `on_prefill`; it ends the text after the pass
        self.is_cancelled, self.is_left = False, False
        self.added = list(request.begun)  # tokens after the prompt
        self.sequence: Sequence | None = None
        self.caches: TextCaches | None = None
        self.draws: tuple[torch.Generator, TextNoise] | None = None  # None: it has not begun
        self._pair, self._advance, self._on_cancel = pair, advance, on_cancel
        self._chunks: list[TextChunk] = []
        self._pieces, _ = begun_pieces(request, pair)
        self._drawn_before: tuple[int, torch.Tensor] | None = None  # pieces, and the generator's state after them
        self._came = time.perf_counter()
        self._first_after_s: float | None = None  # seconds to the first piece
        self._started: float | None = None
        self._total_s = 0.0

    @property
    def is_done(self) -> bool:
        """Return whether nothing more comes."""
        return self.state == "done"

    def cancel(self, *, leaves: bool = False) -> None:
        """End the text after its pass; the pieces so far count as an interrupted text.

        A prompt is read no further. With `leaves` nobody waits for what the pass brings: it goes on for others alone.
        """
        self.is_left = self.is_left or leaves
        self.is_cancelled = True
        if not self.is_done:
            self._on_cancel(self)

    def __iter__(self) -> Generator[TextChunk, None, None]:
        """Yield all pieces as they come; closing the iterator cancels the text. Raises what ended it."""
        num_seen = 0
        try:
            while not self.is_done or num_seen < len(self._chunks):  # in this order: the end comes last
                if num_seen < len(self._chunks):
                    yield self._chunks[num_seen]
                    num_seen += 1
                else:
                    self._advance(functools.partial(self._has_news, num_seen))
            if self.error is not None:
                raise self.error
        finally:
            self.cancel()
            while not self.is_done:
                self._advance(lambda: self.is_done)

    def result(self) -> GenerationResult:
        """Wait for the end, and return the whole text; raises what ended it."""
        while not self.is_done:
            self._advance(lambda: self.is_done)
        if self.error is not None:
            raise self.error
        return self.whole()

    def whole(self) -> GenerationResult:
        """Return the pieces so far as one result."""
        found = finished(self.request, self._chunks, self._pair, total_s=self._total_s)
        return replace(found, first_token_after_s=self._first_after_s)

    def words(self) -> list[list[int]]:
        """Return the text so far without its pictures, in parts."""
        pictures = self.request.pictures
        return without_pictures([*self.request.ids, *self.added], () if pictures is None else pictures.image_rows)

    def start(self) -> None:
        """Note that its turn has come."""
        self.state = "under way"
        if self._started is None:
            self._started = time.perf_counter()

    def begin_step(self) -> None:
        """Note where draws with fresh noise are, for a step that may be left in its middle."""
        if self.sequence is not None and not self.sequence.draws_coupled:
            self._drawn_before = len(self._chunks), self.sequence.generator.get_state()

    def take(self, step: StepResult) -> None:
        """Take what a step added; the text may have ended by it."""
        if self.request.begun and not self._chunks and self.sequence is not None:
            step = replace(step, num_cached=self.sequence.target.num_kept)
        chunk = self._pieces.chunk(step)
        self._chunks.append(chunk)  # from here on it is part of the text
        self._first_after_s = self._first_after_s or time.perf_counter() - self._came
        self.added += chunk.token_ids
        if chunk.finish_reason is not None:
            self.end()

    def begin_again(self) -> None:
        """Go back to the end of the pieces that were taken: the step that was to bring more was left in its middle."""
        self.sequence, (self._pieces, _) = None, begun_pieces(self.request, self._pair)
        for chunk in self._chunks:
            self._pieces.chunk(chunk.step)
        self.added = [*self.request.begun, *(token for chunk in self._chunks for token in chunk.token_ids)]
        if self.draws is not None and self._drawn_before is not None:
            num_chunks, state = self._drawn_before
            if num_chunks == len(self._chunks):
                self.draws[0].set_state(state)
        if self._chunks and self._chunks[-1].finish_reason is not None:
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """Note that nothing more comes; a text ends once."""
        if self.is_done:
            return
        self._total_s = 0.0 if self._started is None else time.perf_counter() - self._started
        self.error, self.seen = error, None
        self.state = "done"  # last: threads that wait for it read the rest

    def _has_news(self, num_seen: int) -> bool:
        return self.is_done or num_seen < len(self._chunks)


class WaitingTexts:
    """Texts in the order in which they begin. Any thread may add one, and an interrupt may fall at any place."""

    def __init__(self) -> None:
        self._waiting: deque[TextHandle] = deque()
        self.cancelled: deque[TextHandle] = deque()  # every cancelled text, until `end_cancelled` has seen it

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[TextHandle]:
        return iter(list(self._waiting))  # another thread may add one meanwhile

    def add(self, handle: TextHandle) -> None:
        """Let a text wait after the others."""
        self._waiting.append(handle)

    def add_first(self, handle: TextHandle) -> None:
        """Let a text wait before the others."""
        self._waiting.appendleft(handle)

    def remove(self, handle: TextHandle) -> None:
        """Take a text out, if it is here."""
        with suppress(ValueError):
            self._waiting.remove(handle)

    @property
    def have_pictures(self) -> bool:
        """Whether the prompt of some text has pictures."""
        return any(handle.request.pictures is not None for handle in self)

    def first(self) -> list[TextHandle]:
        """Return the texts that may begin next."""
        return list(islice(self._waiting, MAX_FIRST))

    def end_cancelled(self) -> None:
        """End the texts that were cancelled while they waited."""
        while self.cancelled:
            handle = self.cancelled[0]
            if handle.state == "waiting":
                handle.end()
            if handle.is_done:
                self.remove(handle)
            self.cancelled.popleft()  # last: an interrupt before it only repeats what is done

    def end_all(self, error: Exception) -> None:
        """End all texts with this error."""
        while self._waiting:
            self._waiting[0].end(error)
            self._waiting.popleft()


def begun_pieces(request: TextRequest, pair: ModelPair) -> tuple[TextPieces, str]:
    """Return what makes text of a request's steps, and the text of the tokens that it goes on after.

    Text of theirs that may yet become another belongs to what follows.
    """
    # What ends a text is no part of it, also where it is not special to the tokenizer.
    keeps_special = not request.skip_special_tokens
    text = TokenText(pair.tokenizer, without=request.stop_tokens, keeps_special=keeps_special)
    pieces = TextPieces(decode=text.step, rest=text.rest, stop=request.stop)
    before = StepResult(
        tokens=request.begun, finish=None, num_drafted=0, is_prefill=False, grow_s=0.0, target_s=0.0, rest_s=0.0
    )
    return pieces, pieces.chunk(before).text


def finished(request: TextRequest, chunks: list[TextChunk], pair: ModelPair, *, total_s: float) -> GenerationResult:
    """Return all chunks of a text as one result."""
    token_ids = tuple(token for chunk in chunks for token in chunk.step.tokens)
    finish = chunks[-1].step.finish if chunks else None
    text = "".join(chunk.text for chunk in chunks)
    if finish is None:  # what was held back comes to no more
        keeps_special = not request.skip_special_tokens
        ids = (*request.begun, *token_ids)
        whole = text_of_tokens(pair.tokenizer, ids, without=request.stop_tokens, keeps_special=keeps_special)
        text += whole[len(begun_pieces(request, pair)[1]) + len(text) :]
    return GenerationResult(
        text=text,
        token_ids=token_ids,
        finish_reason={"length": request.limited_by, "stop": "stop"}[finish] if finish else "interrupted",
        stop_string=chunks[-1].stop_string if chunks else None,
        prompt_tokens=len(request.ids) + len(request.begun),
        image_tokens=0 if request.pictures is None else request.pictures.num_image_tokens,
        seed=request.seed,
        sampling=request.sampling,
        steps=tuple(chunk.step for chunk in chunks),
        total_s=total_s,
    )
