"""A conversation: messages, and the engine's texts, whose caches keep what was read and written.

Every turn's prompt is made anew from all messages. Comparing token ids shows how much of it the caches hold
already, so that a turn reads only what is new, whatever was undone, edited, interrupted or said elsewhere in
between. Nothing that fails changes the messages: a turn counts from its answer's first token on.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from edgespec.chat.answer import AnswerReader, answer_format_of
from edgespec.chat.chat_template import Message, message_fields, plain_ids, template_ids
from edgespec.chat.picture_prompt import Encoded, ids_of, messages_prompt
from edgespec.chat.pictures import Given, PictureSource, check_count
from edgespec.chat.session_file import SavedSession, read_session, transcript, write_session
from edgespec.chat.template_date import telling
from edgespec.chat.tools import Toolset
from edgespec.config import MAX_SEED
from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair
from edgespec.text.context import no_room
from edgespec.text.handle import OnPrefill, begun_pieces, finished
from edgespec.text.request import TextOptions, TextRequest, text_request
from edgespec.text.results import GenerationResult, TextChunk
from edgespec.text.scheduler import Scheduler
from edgespec.text.token_ids import encoded
from edgespec.text.token_text import CUT_CHARACTER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokens_so_far(tokenizer: PreTrainedTokenizerBase, answer: Message | None, *, is_whole: bool) -> tuple[int, ...]:
    """Return the tokens of an answer that goes on; raises EdgespecError for one that does not."""
    if answer is None or answer.role != "assistant":
        raise EdgespecError("E_NO_TURN", "there is no answer to go on with.", "Say something first.")
    for is_so, what in (
        (answer.calls, "calls tools, and what follows calls is their results"),
        (answer.more.get("reasoning_content") and not answer.content.strip(), "has thoughts and no text"),
        (is_whole, "is whole: the model, or a stop string, has ended it"),
    ):
        if is_so:
            raise EdgespecError("E_NO_TURN", f"the last answer {what}.", "Ask for another with `regenerate`.")
    return answer.token_ids or tuple(encoded(tokenizer, answer.content, add_special_tokens=False))


class Conversation:
    """The messages so far, and the options of every answer."""

    def __init__(
        self, pair: ModelPair, texts: Scheduler, *, max_context: int, system: str | None, raw: bool,
        **options: Unpack[TextOptions],
    ) -> None:  # fmt: skip
        """Start an empty conversation, whose answers are among an engine's texts.

        Without `max_new_tokens` an answer may fill the context.

        Without a chat template, or `raw`, the messages are one plain text: see `edgespec.chat.chat_template`.
        """
        self._pair, self._texts, self._max_context = pair, texts, max_context
        self.system = system
        self.is_raw = raw or not pair.tokenizer.chat_template
        self.options: TextOptions = {"max_new_tokens": -1, **options}
        self.template_values: dict[str, Any] = {}  # that the chat template reads, as enable_thinking
        self.day = datetime.date.today()  # in the chat template: it stays at midnight, and so does what was read
        self.messages: tuple[Message, ...] = ()  # without the system's
        self.last: GenerationResult | None = None
        self.toolset = Toolset()
        self.reader: AnswerReader | None = None  # of the answer under way, where there are tools
        self._num_tries = 0  # of the last answer
        self._written: Message | None = None  # what `last` became

    def send(self, text: str, *, images: Sequence[Given] = (), on_prefill: OnPrefill | None = None) -> GenerationResult:
        """Send a message, perhaps with pictures before its words, and return the whole answer."""
        for _ in self.stream(text, images=images, on_prefill=on_prefill):
            pass
        assert self.last is not None
        return self.last

    def stream(
        self, text: str, *, images: Sequence[Given] = (), on_prefill: OnPrefill | None = None
    ) -> Generator[TextChunk, None, None]:
        """Send a message, perhaps with pictures before its words, and yield the answer step by step.

        They are paths, what files hold, pixels, or addresses with data.

        Closing the iterator keeps the answer so far, as one that was interrupted. Raises EdgespecError at once
        where the context has no room; nothing has changed then.
        """
        return self._answer((*self.messages, _user_message(text, images)), tries=0, on_prefill=on_prefill)

    def use_tools(self, toolset: Toolset) -> None:
        """Let answers from the next one on call tools; raises EdgespecError where there is no chat template."""
        if self.is_raw and toolset.seen:
            what = "tools need a chat template, and there is none."
            raise EdgespecError("E_CHAT_TEMPLATE", what, "Leave them out, or give a `chat_template`.")
        self.toolset = toolset
        self.options["skip_special_tokens"] = not toolset.seen

    @property
    def pending_calls(self) -> list[Mapping[str, Any]]:
        """The calls of the last answer whose results are not there yet."""
        num_results = len(list(takewhile(lambda message: message.role == "tool", reversed(self.messages))))
        answer = self.messages[-num_results - 1 :][:1]
        return [call for message in answer for call in message.calls[num_results:]]

    def give_result(self, text: str) -> None:
        """Give the result of the first call that waits for one; raises EdgespecError where none does."""
        if not self.pending_calls:
            raise EdgespecError("E_NO_TURN", "no call waits for a result.", "Say something first.")
        call = self.pending_calls[0]
        more = {"tool_call_id": call["id"], "name": call["function"]["name"]}
        self.messages = (*self.messages, Message(role="tool", content=text, more=more))

    def go_on(self, *, on_prefill: OnPrefill | None = None) -> Generator[TextChunk, None, None]:
        """Yield the answer to the results of calls, step by step."""
        return self._answer(self.messages, tries=0, on_prefill=on_prefill)

    def regenerate(self, *, on_prefill: OnPrefill | None = None) -> Generator[TextChunk, None, None]:
        """Answer the last message again, with the next seed; the old answer stays until there is a new one."""
        before, _ = self.last_turn()
        question = self.messages[len(before)]
        return self._answer((*before, question), tries=self._num_tries + 1, on_prefill=on_prefill)

    def resume(self, *, on_prefill: OnPrefill | None = None) -> Generator[TextChunk, None, None]:
        """Go on with the last answer, which was cut, as if it had not been, and yield what it gains step by step.

        Raises EdgespecError where there is none, where it is whole, and where it calls tools.
        """
        answer, own = self.messages[-1] if self.messages else None, None
        if answer is not None and answer is self._written:
            own = self.last
        is_whole = own is not None and own.finish_reason == "stop"
        begun = tokens_so_far(self._pair.tokenizer, answer, is_whole=is_whole)
        seed = None if own is None else own.seed
        return self._answer(self.messages[:-1], tries=self._num_tries, on_prefill=on_prefill, begun=begun, seed=seed)

    def edit(self, text: str, *, on_prefill: OnPrefill | None = None) -> Generator[TextChunk, None, None]:
        """Send this in place of the last message's words, and yield the answer step by step."""
        before, _ = self.last_turn()
        edited = replace(self.messages[len(before)], content=text)
        return self._answer((*before, edited), tries=0, on_prefill=on_prefill)

    def undo(self) -> str:
        """Take the last message and its answer back, and return the message."""
        self.messages, question = self.last_turn()
        return question

    def clear(self) -> int:
        """Forget all turns, and their keys and values, and return how many there were; the system's message stays."""
        num_turns = self.num_turns
        self._texts.prefix_cache.forget()
        self.messages, self.day = (), datetime.date.today()
        return num_turns

    def compact(self) -> tuple[Message, ...]:
        """Drop the oldest turns until half of the context is free, and return their messages.

        The system's message and the last turn stay. Raises EdgespecError where there is none to drop.
        """
        questions = [index for index, message in enumerate(self.messages) if message.role == "user"]
        if len(questions) < 2:
            raise EdgespecError(
                "E_NO_TURN", "there is no turn before the last to drop.", "Forget all with `clear`, or go on."
            )
        before = self.messages
        for start in questions[1:]:
            self.messages = before[start:]
            if 2 * self.num_tokens <= self._max_context:
                break
        return before[: len(before) - len(self.messages)]

    @property
    def num_turns(self) -> int:
        """The number of the user's messages."""
        return sum(message.role == "user" for message in self.messages)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all messages, with the template's."""
        return len(self.prompt_ids(self.messages)) if self.messages else 0

    def prompt_ids(self, messages: tuple[Message, ...]) -> list[int]:
        """Return the ids of the system's message and these messages, up to where an answer begins."""
        return ids_of(self._read(messages))

    def _read(self, messages: tuple[Message, ...]) -> Encoded:
        """Return the system's message and these messages as the model reads them."""
        system = (Message(role="system", content=self.system),) if self.system else ()
        whole, tokenizer = (*system, *messages), self._pair.tokenizer
        sees = any(message.pictures for message in whole)
        if self.is_raw and sees:
            what = "pictures need a chat template, and there is none."
            raise EdgespecError("E_CHAT_TEMPLATE", what, "Leave them out, or give a `chat_template`.")
        if self.is_raw:
            return plain_ids(tokenizer, whole)
        fields = [message_fields(tokenizer, message) for message in whole]
        values = {**self._pair.template_args, **self.template_values}
        if self.toolset.seen:
            values["tools"] = self.toolset.for_template()
        tokenizer = telling(tokenizer, self.day)
        if sees:
            return messages_prompt(replace(self._pair, tokenizer=tokenizer), fields, values=values)
        return template_ids(tokenizer, fields, values=values)

    def first_ids(self, text: str) -> list[int]:
        """Return the ids of a conversation that begins with this message."""
        return self.prompt_ids((_user_message(text),))

    def check_room(self, text: str, images: Sequence[Given] = ()) -> int:
        """Return the number of the prompt's tokens with this as the next message; raises EdgespecError if too many."""
        return len(self._request((*self.messages, _user_message(text, images)), tries=0).ids)

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        settings: Mapping[str, Any] | None = None,
        stats: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a session, or a transcript where the name ends in .md; raises EdgespecError if the file exists."""
        pair = self._pair
        session = SavedSession(
            model=str(pair.target.folder),
            draft_model=str(pair.draft.named) if pair.draft else None,
            adapters=tuple((one.name, str(one.adapter.path.absolute()), one.scale) for one in pair.target.adapters),
            system=self.system,
            day=self.day,
            settings=dict(settings or {}),
            messages=self.messages,
            stats=dict(stats or {}),
        )
        if Path(path).suffix.lower() == ".md":
            write_session(Path(path), transcript(session), overwrite=overwrite)
        else:
            write_session(Path(path), session.document(), overwrite=overwrite)

    def load(self, path: str | Path) -> SavedSession:
        """Go on from a saved session, whose messages and system's message replace these. Raises EdgespecError."""
        session = read_session(Path(path), self._pair.tokenizer)
        self.system, self.messages, self._num_tries = session.system, session.messages, 0
        self.day = session.day or datetime.date.today()
        return session

    def last_turn(self) -> tuple[tuple[Message, ...], str]:
        """Return the messages before the user's last one, and its text."""
        for index in reversed(range(len(self.messages))):
            if self.messages[index].role == "user":
                return self.messages[:index], self.messages[index].content
        raise EdgespecError("E_NO_TURN", "nothing was said yet.", "Say something first.")

    def _answer(
        self, messages: tuple[Message, ...], *, tries: int, on_prefill: OnPrefill | None,
        begun: tuple[int, ...] = (), seed: int | None = None,
    ) -> Generator[TextChunk, None, None]:  # fmt: skip
        request = self._request(messages, tries=tries, begun=begun)
        request = request if seed is None else replace(request, seed=seed)
        tokenizer, tools = self._pair.tokenizer, self.toolset
        self.reader = tools.reader(tokenizer, answer_format_of(tokenizer), request.ids) if tools.seen else None
        if self.reader is not None and begun:
            self.reader.feed(begun_pieces(request, self._pair)[1])
        return self._chunks(request, messages, tries=tries, on_prefill=on_prefill)

    def _request(self, messages: tuple[Message, ...], *, tries: int, begun: tuple[int, ...] = ()) -> TextRequest:
        options = self.options.copy()
        if begun and (most := options.get("max_new_tokens") or 0) > 0:
            options["max_new_tokens"] = most + len(begun)
        seed = options.get("seed")
        if seed is not None:
            options["seed"] = (seed + tries) % (MAX_SEED + 1)
        read = self._read(messages)
        many = len(ids_of(read)) + len(begun), self.num_tokens, self._max_context
        full = no_room(*many, has_older=self.num_turns > 1)
        try:
            make = text_request if self.is_raw else self.toolset.request
            request = make(read, pair=self._pair, max_context=self._max_context, config=None, options=options)
        except EdgespecError as error:
            if error.code != "E_CONTEXT":
                raise
            raise full from error
        if request.max_new_tokens <= len(begun):
            raise full
        return replace(request, begun=begun)

    def _chunks(
        self, request: TextRequest, messages: tuple[Message, ...], *, tries: int, on_prefill: OnPrefill | None
    ) -> Generator[TextChunk, None, None]:
        started = time.perf_counter()
        chunks: list[TextChunk] = []
        running = iter(self._texts.submit(request, reuse=True, on_prefill=on_prefill))
        try:
            for chunk in running:
                chunks.append(chunk)
                yield chunk
        finally:
            running.close()
            self.last = finished(request, chunks, self._pair, total_s=time.perf_counter() - started)
            if chunks:
                self._num_tries = tries
                self._written = self._message(request, self.last)
                self.messages = (*messages, self._written)

    def _message(self, request: TextRequest, answer: GenerationResult) -> Message:
        """Return the answer as it will be read again; the token that ended it belongs to the template.

        With tools the template writes calls and thoughts, and not the model's own tokens of them.
        """
        ids = [*request.begun, *answer.token_ids]
        is_ended = bool(ids) and ids[-1] in request.stop_tokens
        if is_ended:
            ids.pop()
        text = begun_pieces(request, self._pair)[1] + answer.text
        if self.toolset.seen:
            message = self.toolset.message(self._pair.tokenizer, request.ids, text)
            role, content = message.pop("role"), message.pop("content") or ""
            is_cut = answer.finish_reason == "interrupted"
            return Message(role=role, content=content, is_interrupted=is_cut, more=message)
        return Message(
            role="assistant",
            content=text.rstrip(CUT_CHARACTER),  # a part of a character is nothing to read
            # A stop string that ended it is among the tokens, and no part of the text.
            token_ids=() if answer.finish_reason == "stop" and not is_ended else tuple(ids),
            is_interrupted=answer.finish_reason == "interrupted",
        )


def _user_message(text: str, images: Sequence[Given] = ()) -> Message:
    """Return a message; its pictures are read once, so that a later turn sees the same ones. Raises EdgespecError."""
    check_count(images)
    paths = [Path(image) if isinstance(image, str) and not image.startswith("data:") else image for image in images]
    sources = [PictureSource(where=f"picture {number}", given=given) for number, given in enumerate(paths, 1)]
    return Message(role="user", content=text, pictures=tuple(source.known() for source in sources))
