"""The rows of a run that are under way together, until each has its answers, one turn after the other."""

import functools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from edgespec.chat.chat_template import Message
from edgespec.chat.picture_prompt import Encoded
from edgespec.cli.console import Console, counted
from edgespec.cli.faults import as_edgespec_error
from edgespec.cli.generate.progress import RunProgress
from edgespec.cli.generate.records import RowRecord, Totals, error_record, success_record, totals
from edgespec.cli.generate.requests import EncodeTurn, Request
from edgespec.cli.open_engine import engine_trees_in_words
from edgespec.cli.spelling import spelled_error
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.text.handle import OnPrefill, TextHandle
from edgespec.text.logprob_entries import prompt_fields
from edgespec.text.results import GenerationResult

ROWS_AHEAD = 4  # whose pictures are read while others are under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all prompts have in common."""

    console: Console
    engine: Engine
    predicted_per_s: float | None  # tokens, by the plan of the engine's profile, where that is followed
    fields: dict[str, Any]  # of every record
    encode: EncodeTurn
    num_pressed: Callable[[], int] = lambda: 0  # how often Ctrl-C was pressed

    def check(self) -> None:
        """Raise KeyboardInterrupt where Ctrl-C was pressed: between two texts nothing is lost."""
        if self.num_pressed():
            raise KeyboardInterrupt

    def record(
        self, request: Request, results: Sequence[GenerationResult], error: Exception | None = None
    ) -> RowRecord:
        """Return the record of a prompt that has ended: answered, or by an `error`.

        Raises an unexpected error itself where EDGESPEC_DEBUG is set.
        """
        if error is None:
            record = success_record(request, self.engine, results, self.fields, self.predicted_per_s)
            tokenizer, row = self.engine.pair.tokenizer, request.row
            if request.prompt_logprobs is not None:  # of the last turn's prompt, which has those before it
                found = results[-1].prompt_logprobs
                record["prompt_logprobs"] = prompt_fields(tokenizer, request.ids[0], found)
            if row.echoes or (row.kind == "completion" and request.prompt_logprobs is not None):
                record["echo"] = tokenizer.decode(list(row.token_ids)) if row.token_ids else row.as_written
            return RowRecord(request=request, record=record, totals=totals(results))
        if os.environ.get("EDGESPEC_DEBUG") and not isinstance(error, EdgespecError):
            raise error
        fault = spelled_error(as_edgespec_error(error))
        return RowRecord(request=request, record=error_record(request, results, fault, self.fields), totals=Totals())


class RowAnswers:
    """A row under way.

    A turn keeps the keys and values of the turns before it; a row keeps none of another row, so that its text does not
    depend on what was run before.
    """

    def __init__(self, run: Run, request: Request, *, on_prefill: OnPrefill | None = None) -> None:
        self.request = request
        self.results: list[GenerationResult] = []  # of the turns that are answered
        self._engine, self._encode, self._on_prefill = run.engine, run.encode, on_prefill
        self._answers: tuple[Message, ...] = ()
        self._handle: TextHandle | None = None  # of the turn under way

    @property
    def is_done(self) -> bool:
        """Return whether all turns are answered."""
        return len(self.results) == self.request.row.num_turns

    @property
    def is_under_way(self) -> bool:
        """Return whether the last turn that was requested has begun, or has ended."""
        return self._handle is not None and self._handle.state != "waiting"

    @property
    def is_read(self) -> bool:
        """Return whether nothing of that turn's prompt is left to read."""
        return self._handle is not None and bool(self._handle.added or self._handle.is_done)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all answers so far."""
        now = 0 if self._handle is None else len(self._handle.added)
        return now + sum(len(result.token_ids) for result in self.results)

    def next_turn(self) -> TextHandle:
        """Request the next turn's answer; raises EdgespecError where it does not fit the context."""
        request, turn = self.request, len(self.results)
        if request.fault is not None:
            raise request.fault
        is_known = not turn and (request.pictures is not None or not request.row.sees)
        text_request = self._engine.request(
            (request.pictures or request.ids) if is_known else self._encode(request.row, self._answers),
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            seed=request.seed,
            name=request.row.id,  # and not its place in the file, so that other rows change nothing
            stop=request.stop,
            skip_special_tokens=request.skip_special_tokens,
            grammar=request.grammar,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            adapters=request.adapters,
            **request.token_options,
        )
        is_last = turn == request.row.num_turns - 1
        text_request = replace(text_request, thought_budget=request.thought_budget)
        self._handle = self._engine.submit(text_request, reuse=turn > 0, keeps=not is_last, on_prefill=self._on_prefill)
        return self._handle

    def take(self, handle: TextHandle) -> None:
        """Take a turn's answer; raises what ended it, or KeyboardInterrupt when it was cancelled."""
        result = handle.result()
        if result.finish_reason == "interrupted":
            raise KeyboardInterrupt
        ends = self._engine.pair.stop_tokens | set(self.request.token_options.get("eos_token_id", ()))
        self._answers += (_answer(ends, result),)
        self.results.append(result)
        self._handle = None


class RowsTogether:
    """The rows that share passes; others enter as rows end."""

    def __init__(
        self, run: Run, next_request: Callable[[], Request | None], *, progress: RunProgress | None = None
    ) -> None:
        """Begin with none: `next_request` returns one where any waits. `progress` shows how it goes."""
        self._run, self._next_request, self._progress = run, next_request, progress
        self._under_way: dict[TextHandle, RowAnswers] = {}

    @property
    def rows(self) -> list[RowAnswers]:
        """Return the rows that have begun and not ended."""
        return list(self._under_way.values())

    def step(self) -> Generator[RowRecord, None, bool]:
        """Make one pass and yield the rows that ended; return whether there are others.

        Raises KeyboardInterrupt where texts were cancelled, after it has yielded those that ended before.
        """
        run, under_way = self._run, self._under_way
        while len(under_way) < run.engine.run_config.num_texts:
            request = self._next_request()
            if request is None:
                break
            reads = None if self._progress is None else self._progress.reads(request)
            yield from self._begin(RowAnswers(run, request, on_prefill=reads))
        if not under_way:
            return False
        with reporting_cuts(run):
            num_texts = run.engine.advance()
        if self._progress is not None and not run.num_pressed():  # else what the key was answered with is drawn over
            tokens = {row.request.row.id: row.num_tokens for row in self.rows if row.is_under_way}
            self._progress.show(num_texts, tokens, are_read=all(row.is_read for row in self.rows))
        ended = [handle for handle in under_way if handle.is_done]
        going_on: list[RowAnswers] = []  # after those that ended, which Ctrl-C must not lose
        for handle in sorted(ended, key=lambda handle: handle.whole().finish_reason == "interrupted"):
            row = under_way.pop(handle)
            if handle.error is not None:
                yield run.record(row.request, row.results, handle.error)
                continue
            row.take(handle)
            say_trees(run, row.results[-1])
            if row.is_done:
                yield run.record(row.request, row.results)
            else:
                going_on.append(row)
        for row in going_on:
            yield from self._begin(row)
        return True

    def close(self) -> None:
        """End all texts."""
        for handle in self._under_way:
            handle.cancel()

    def _begin(self, row: RowAnswers) -> Iterator[RowRecord]:
        """Request a row's next answer; yields the row where that fails."""
        self._run.check()
        try:
            self._under_way[row.next_turn()] = row
        except Exception as error:
            yield self._run.record(row.request, row.results, error)


def together(run: Run, requests: Iterable[Request], progress: RunProgress) -> Generator[RowRecord, None, None]:
    """Yield prompts in the order in which they end; as many are under way as the engine has memory for.

    `progress` shows how it goes. Raises KeyboardInterrupt where texts were cancelled, after those that ended before.
    """
    with (
        closing(_reading_ahead(requests, run.encode)) as ahead,
        closing(RowsTogether(run, functools.partial(next, ahead, None), progress=progress)) as rows,
    ):
        while (yield from rows.step()):
            pass


def _reading_ahead(requests: Iterable[Request], encode: EncodeTurn) -> Generator[Request, None, None]:
    """Yield requests; a thread reads the pictures of the next ones, where they were not kept, while passes are made."""
    waiting: deque[tuple[Request, Future[Encoded] | None]] = deque()
    with ThreadPoolExecutor(1, "edgespec-pictures") as reader:
        for request in requests:
            is_read = not request.row.sees or request.pictures is not None or request.fault is not None
            waiting.append((request, None if is_read else reader.submit(encode, request.row, ())))
            if len(waiting) > ROWS_AHEAD:
                yield _with_pictures(*waiting.popleft())
        while waiting:
            yield _with_pictures(*waiting.popleft())


def _with_pictures(request: Request, read: Future[Encoded] | None) -> Request:
    """Return a request with its pictures; where they cannot be read any more, that is said as its text begins."""
    found = None if read is None or read.exception() is not None else read.result()
    return replace(request, pictures=found) if isinstance(found, PicturePrompt) else request


@contextmanager
def reporting_cuts(run: Run) -> Iterator[None]:
    """Say where memory runs out within this block, and trees become smaller or texts fewer."""
    engine, largest_tree, num_texts = run.engine, run.engine.largest_tree, run.engine.num_texts
    before = engine_trees_in_words(engine)
    yield
    if engine.num_texts < num_texts:
        is_first = num_texts == engine.run_config.num_texts
        say = run.console.say if is_first else run.console.detail  # each step further down is no news
        now = counted(engine.num_texts, "text")
        say(f"memory ran out in a pass: at most {now} under way from here on, no longer {num_texts}")
    if engine.largest_tree != largest_tree:
        run.console.say(f"memory ran out in a pass: {engine_trees_in_words(engine)} from here on, no longer {before}")


def say_trees(run: Run, result: GenerationResult) -> None:
    """Say in detail what trees such texts have."""
    trees = run.engine.trees_in_use(result.sampling)
    if trees is not None:
        run.console.detail(trees)


def _answer(ends: frozenset[int], result: GenerationResult) -> Message:
    """Return the answer as the next turn reads it: its very tokens, but without one of those that end it.

    Where a stop string cut the text, the text is encoded anew.
    """
    ids = result.token_ids
    if ids and ids[-1] in ends:
        ids = ids[:-1]
    elif result.finish_reason == "stop":
        ids = ()
    return Message(role="assistant", content=result.text, token_ids=ids)
