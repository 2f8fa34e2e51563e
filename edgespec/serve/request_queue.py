"""The core of the server: a job in, events of its texts out. It knows the engine, and no protocol."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

from edgespec.chat.chat_template import Message, plain_ids
from edgespec.chat.continued import goes_on
from edgespec.chat.picture_parts import sources_of, with_sources
from edgespec.chat.picture_prompt import Encoded, read_prompt
from edgespec.chat.prompt_ids import are_messages
from edgespec.chat.rendering import named, with_text
from edgespec.config import SamplingSettings
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair
from edgespec.sampling.grammar import Grammar
from edgespec.serve.refusal import BAD_REQUEST, TOO_MANY, UNAVAILABLE, RefusalError
from edgespec.text.bias import options_of_ends
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextOptions, TextRequest, chosen_grammar, grammar_for
from edgespec.text.results import GenerationResult, TextChunk
from edgespec.text.token_ids import Prompt


def sampling_of_requests(pair: ModelPair, temperature: float | None) -> SamplingSettings:
    """Return how texts are drawn whose requests do not say it; a temperature of the user's counts above the model's."""
    own = pair.default_sampling(draws=True)
    return own if temperature is None else replace(own, temperature=temperature)


T = TypeVar("T")
Ended = TypeVar("Ended", bound="TextEnded")
LOG = logging.getLogger("edgespec.serve")
GRAMMARS = {"json_schema", "response_format", "grammar"}
MAX_GRAMMAR_CHARACTERS = 1 << 17  # others' grammars wait while one is compiled: two seconds for so many
IDLE_S = 10.0  # without a text, after which rows of conversations are written
LOOKS = 5  # in this time
MAX_SAID = 256  # lines of the log about what clients ask for: parts of them are their own words


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a client wants: prompts, how they continue, and how many texts of each."""

    prompts: Sequence[Prompt]
    options: TextOptions
    template_values: Mapping[str, Any] = field(default_factory=dict)  # beside the pair's own, as tools
    num_samples: int = 1  # of each prompt
    stop_token_ids: Sequence[int] = ()  # that end texts beside the model's own
    continues: bool | None = None  # the last message, which is the assistant's; None: unless its `prefix` is false


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """A sign of life while nothing is written: tokens of prompts that are read, of how many."""

    num_read: int
    num_all: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What a pass added to a text."""

    index: int  # of the text in the job: samples of a prompt follow each other
    chunk: TextChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEnded:
    """A text that is whole, or was interrupted."""

    index: int
    result: GenerationResult
    num_thought: int = 0  # of its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFailed:
    """A text that an error ended."""

    index: int
    error: Exception


TextEvent: TypeAlias = PromptProgress | TextDelta | TextEnded | TextFailed


class RequestQueue:
    """The texts of all clients, of which some are under way and a bounded number waits."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int,
        heartbeat_s: float,
        idle_s: float = IDLE_S,
        temperature: float | None = None,
        cache_prompt: bool = True,
    ) -> None:
        """Make texts of the engine; `temperature` and `cache_prompt` are those of requests that do not say them.

        None is the model's own, and 1 where it states none, as clients of OpenAI's interface expect.
        """
        self.engine, self._idle_s, self._cache_prompt = engine, idle_s, cache_prompt
        self.sampling = sampling_of_requests(engine.pair, temperature)
        self.max_open = engine.num_texts + max_waiting  # texts that may be open
        self._heartbeat_s = heartbeat_s
        self._threads = ThreadPoolExecutor(self.max_open, thread_name_prefix="text")
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="prompt")  # a long prompt stops no other answers
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # nor does a grammar stop other prompts
        # Files take seconds: prompts are encoded meanwhile, and texts go on.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._open: set[TextHandle] = set()
        self._num_coming, self._num_encoding = 0, 0  # texts whose prompts are encoded, and all that is
        # With tokens of thought; any thread calls it.
        self.on_ended: Callable[[GenerationResult, int], None] = lambda _result, _num_thought: None
        self._is_closing = False
        self._last_ended_s: float | None = None  # of the texts that are not stored
        self._said: set[str] = set()

    @property
    def num_open(self) -> int:
        """The number of texts that wait or are under way."""
        return len(self._open)

    def say_once(self, what: str) -> None:
        """Say in the log what clients ask for and do not get, once for all requests."""
        if what not in self._said and len(self._said) < MAX_SAID:
            self._said.add(what)
            LOG.warning(what)

    def check_open(self, num_texts: int = 1) -> None:
        """Raise RefusalError where so many texts more are too many, or the server ends."""
        if self._is_closing:
            raise RefusalError(UNAVAILABLE, "the server is stopping.", code="server_stopping")
        if (num_open := len(self._open) + self._num_coming) + num_texts > self.max_open:
            what = f"{num_open} texts wait or are under way, and {self.max_open} may."
            raise RefusalError(TOO_MANY, f"{what} Try again later, or ask for fewer.", code="queue_full")

    async def requests(self, job: Job) -> list[TextRequest]:
        """Return the checked requests of a job's texts; raises RefusalError and EdgespecError, before anything runs."""
        num_texts = len(job.prompts) * job.num_samples
        self.check_open(num_texts)
        self._num_coming += num_texts
        try:
            if GRAMMARS & job.options.keys():
                await self.encoding(self._compiled, job, by=self._compiler)
            return await self.encoding(self._made, job)
        finally:
            self._num_coming -= num_texts

    async def encoding(self, work: Callable[..., T], *values: Any, by: Executor | None = None) -> T:
        """Return what work on a prompt returns, done in the thread that encodes: meanwhile others are answered."""
        if self._num_encoding > self.max_open:
            what = f"{self._num_encoding} prompts wait to be encoded. Try again later."
            raise RefusalError(TOO_MANY, what, code="queue_full")
        self._num_encoding += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(by or self._encoder, partial(work, *values))
        finally:
            self._num_encoding -= 1

    async def with_grammar(self, requests: Sequence[TextRequest], grammar: Grammar) -> list[TextRequest]:
        """Return the requests of one job for texts that match a grammar; raises EdgespecError."""
        _check_grammar("tools", grammar.text)
        one = requests[0]
        make = partial(grammar_for, grammar, one.sampling, self.engine.pair, stop_tokens=one.stop_tokens)
        found = await self.encoding(make, by=self._compiler)
        return [replace(request, grammar=found) for request in requests]

    def _compiled(self, job: Job) -> None:
        """Compile the grammar of a job's texts, which is kept for them; raises RefusalError and EdgespecError."""
        for name in GRAMMARS & job.options.keys():
            _check_grammar(name, job.options[name])  # type: ignore[literal-required]
        grammar = chosen_grammar(dict(job.options))
        if grammar is not None and not job.stop_token_ids:  # whose own ends are known with the prompt
            grammar_for(grammar, self.sampling, self.engine.pair)

    def _made(self, job: Job) -> list[TextRequest]:
        found = []
        own: TextOptions = {"sampling": self.sampling, "cache_prompt": self._cache_prompt, **job.options}
        if job.stop_token_ids:
            ends = options_of_ends(job.stop_token_ids, self.engine.pair, ignore_eos=own.get("ignore_eos", False))
            own = cast(TextOptions, {**own, **ends})
        for prompt in job.prompts:
            read = self._read(prompt, job)
            for sample in range(job.num_samples):
                # The first draws as `edgespec generate` does for one prompt.
                options: TextOptions = {**own, "name": str(sample)} if sample else own
                found.append(self.engine.request(read, **options))
        return found

    def _read(self, prompt: Prompt, job: Job) -> Encoded:
        """Return a prompt as the model reads it; without a chat template messages are one text, as in `edgespec chat`.

        What a client sends is never the name of a file.
        """
        tokenizer, most = self.engine.pair.tokenizer, self.engine.max_context
        if (
            isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > most
        ):  # before anything looks at each of them
            what = f"the prompt has {len(prompt)} tokens or messages, and the context holds {most} tokens."
            raise EdgespecError("E_CONTEXT", what, "Shorten the prompt.")
        if are_messages(prompt) and not tokenizer.chat_template:
            goes_on(prompt, job.continues)  # in one text an answer goes on with whatever is last
            if sources_of(prompt := with_sources(prompt)):
                what = "pictures need a chat template, and the model has none."
                raise EdgespecError("E_CHAT_TEMPLATE", what, "Leave them out, or give a `chat_template`.")
            whole = [with_text(message, named(number, message)) for number, message in enumerate(prompt, 1)]
            messages = [Message(role=fields["role"], content=fields["content"] or "") for fields in whole]
            return plain_ids(tokenizer, messages, max_tokens=most)
        values = {**self.engine.pair.template_args, **job.template_values}
        return read_prompt(self.engine.pair, prompt, values=values, max_tokens=most, continues=job.continues)

    async def events(
        self,
        requests: Sequence[TextRequest],
        *,
        started: list[TextHandle] | None = None,
        num_thought: Callable[[Sequence[int]], int] = lambda _tokens: 0,
    ) -> AsyncGenerator[TextEvent, None]:
        """Start the texts, and yield what becomes of them; closing the generator ends those that still run.

        Their handles are put into `started`, so that single ones can be ended. Of ended texts, `num_thought` says how
        many tokens are thought.
        """
        self.check_open(len(requests))
        loop, events = asyncio.get_running_loop(), asyncio.Queue[TextEvent]()

        def post(event: TextEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        progress: dict[int, tuple[int, int]] = {}
        handles = [] if started is None else started
        try:
            for index, request in enumerate(requests):
                on_prefill = partial(_note, progress, index)
                handles.append(self.engine.submit(request, reuse=True, on_prefill=on_prefill))
                self._open.add(handles[-1])
            for index, handle in enumerate(handles):
                self._threads.submit(self._follow, index, handle, post, num_thought)
            num_running = len(handles)
            while num_running:
                try:
                    # Not wait_for, which in Python 3.11 may swallow that the client has left
                    async with asyncio.timeout(self._heartbeat_s):
                        event: TextEvent = await events.get()
                except TimeoutError:
                    read, every = (
                        (sum(counts) for counts in zip(*progress.values(), strict=True)) if progress else (0, 0)
                    )
                    event = PromptProgress(num_read=read, num_all=every)
                num_running -= isinstance(event, TextEnded | TextFailed)
                yield event
        finally:
            for handle in handles:
                handle.cancel(leaves=True)

    def _follow(self, index: int, handle: TextHandle, post: Any, num_thought: Callable[[Sequence[int]], int]) -> None:
        """Wait for a text to its end, in a thread of its own."""
        try:
            for chunk in handle:
                post(TextDelta(index=index, chunk=chunk))
            result = handle.whole()
            thought = num_thought(result.token_ids)
            self.on_ended(result, thought)
            post(TextEnded(index=index, result=result, num_thought=thought))
        except Exception as error:  # it ends this text alone
            post(TextFailed(index=index, error=error))
        finally:
            self._last_ended_s = time.monotonic()
            self._open.discard(handle)

    async def store_when_idle(self) -> None:
        """Write rows of conversations whenever no text was open for a while; until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._idle_s / LOOKS)
            ended = self._last_ended_s
            if ended is not None and not self._open and time.monotonic() - ended > self._idle_s:
                try:
                    await loop.run_in_executor(self._writer, self.engine.prefix_cache.store)
                except Exception:
                    LOG.exception("conversations could not be written")
                if self._last_ended_s == ended:
                    self._last_ended_s = None

    def stop(self, *, at_once: bool = False) -> None:
        """End all texts after their pass, or between two layers; any thread may call this, and a signal's handler."""
        self._is_closing = True
        self.engine.cancel(abandon=at_once)

    def close(self) -> None:
        """Wait until no thread follows a text any more."""
        self._is_closing = True
        self.engine.cancel()
        self._threads.shutdown(cancel_futures=True)
        self._encoder.shutdown(cancel_futures=True)
        self._compiler.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)


async def ends_of(events: AsyncGenerator[Any, None], kind: type[Ended]) -> list[Ended]:
    """Return the ends of a job's texts, of this kind, in their order; raises the first error, which ends the others."""
    found: dict[int, Ended] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, TextFailed):
                raise event.error
            if isinstance(event, kind):
                found[event.index] = event
    return [found[index] for index in sorted(found)]


def _check_grammar(name: str, grammar: Any) -> None:
    num_characters = len(grammar if isinstance(grammar, str) else json.dumps(grammar))
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        what = f"'{name}' has {num_characters} characters, and {MAX_GRAMMAR_CHARACTERS} may be. Shorten it."
        raise RefusalError(BAD_REQUEST, what, code="invalid_value", field=name)


def _note(progress: dict[int, tuple[int, int]], index: int, num_read: int, num_all: int) -> None:
    progress[index] = num_read, num_all
