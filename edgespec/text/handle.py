"""A text that an engine was asked for: its pieces as they come, its end, and how somebody asks for that end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Literal

from tokenizers.decoders import DecodeStream

from edgespec.decode.session import Session
from edgespec.decode.step import StepResult
from edgespec.pair.pair import ModelPair
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult, TextChunk
from edgespec.text.stops import TextPieces

if TYPE_CHECKING:
    from edgespec.text.caches import TextCaches

OnPrefill = Callable[[int, int], None]  # tokens of the prompt that are read, of how many that were not cached
State = Literal["waiting", "under way", "done"]


class TextHandle:
    """One text, from the moment it was asked for. Any thread may iterate over it, wait for it or cancel it."""

    def __init__(
        self,
        request: TextRequest,
        pair: ModelPair,
        *,
        reuse: bool,
        keeps: bool,
        on_prefill: OnPrefill | None,
        advance: Callable[[TextHandle], object],
    ) -> None:
        """Wait for its turn; `advance` works on the engine's texts until this one has a new piece or has ended."""
        self.request, self.reuse, self.keeps, self.on_prefill = request, reuse, keeps, on_prefill
        self.state: State = "waiting"
        self.error: Exception | None = None
        self.is_cancelled = False
        self.added: list[int] = []  # tokens behind the prompt
        self.session: Session | None = None
        self.caches: TextCaches | None = None
        self._pair, self._advance = pair, advance
        self._chunks: list[TextChunk] = []
        self._unseen: deque[TextChunk] = deque()
        self._started: float | None = None
        self._total_s = 0.0
        decoder = DecodeStream(skip_special_tokens=True)
        backend = pair.tokenizer.backend_tokenizer

        def spell(token: int) -> str:
            # What ends a text is no part of it, also where it is not special to the tokenizer.
            return "" if token in pair.stop_tokens else decoder.step(backend, token) or ""

        self._pieces = TextPieces(decode=spell, stop=request.stop)

    @property
    def is_done(self) -> bool:
        """Return whether nothing more comes."""
        return self.state == "done"

    @property
    def has_unseen(self) -> bool:
        """Return whether pieces wait to be looked at."""
        return bool(self._unseen)

    def cancel(self) -> None:
        """End the text after its pass; the pieces so far count as an interrupted text."""
        self.is_cancelled = True

    def chunks(self) -> Generator[TextChunk, None, None]:
        """Yield the pieces as they come; closing the iterator cancels the text. Raises what ended it."""
        try:
            while True:
                while self._unseen:
                    yield self._unseen.popleft()
                if self.is_done:
                    break
                self._advance(self)
            if self.error is not None:
                raise self.error
        finally:
            self.cancel()
            while not self.is_done:
                self._unseen.clear()
                self._advance(self)

    def __iter__(self) -> Generator[TextChunk, None, None]:
        return self.chunks()

    def result(self) -> GenerationResult:
        """Wait for the end, and return the whole text; raises what ended it."""
        while not self.is_done:
            self._advance(self)
            self._unseen.clear()
        if self.error is not None:
            raise self.error
        return self.whole()

    def whole(self) -> GenerationResult:
        """Return the pieces so far as one result."""
        return finished(self.request, self._chunks, self._pair, total_s=self._total_s)

    def start(self) -> None:
        """Note that its turn has come."""
        self.state = "under way"
        if self._started is None:
            self._started = time.perf_counter()

    def take(self, step: StepResult) -> None:
        """Take what a step added; the text may have ended by it."""
        chunk = self._pieces.chunk(step)
        self.added += step.tokens
        self._chunks.append(chunk)
        self._unseen.append(chunk)
        if chunk.step.finish is not None:
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """Note that nothing more comes."""
        self.state, self.error, self.session = "done", error, None
        self._total_s = 0.0 if self._started is None else time.perf_counter() - self._started


def finished(request: TextRequest, chunks: list[TextChunk], pair: ModelPair, *, total_s: float) -> GenerationResult:
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
