"""An answer's parts, told apart while it is written: what is said, what was thought before, calls of tools.

A description in transformers' form says how a model's family writes them (`answer_formats.json`): the tokenizer's own
`response_template`, or the first one whose marks stand in the chat template. A call that is none, for example because
the text was cut in it, is said as it was written: nothing is lost. `call_body.py` tells where a call ends, and
`call_values.py` what it says.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgespec.chat.answer_marks import Mark, next_mark, pattern_of
from edgespec.chat.call_body import Body, call_body
from edgespec.chat.call_values import call_values
from edgespec.chat.given_template import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": schema}}
_FORMATS = Path(__file__).with_name("answer_formats.json")
_NO_ANCHOR = "\x00"  # the prompt's last words are given alone, and need none
_KINDS: dict[str, Literal["content", "reasoning"]] = {
    "content": "content", "reasoning": "reasoning", "reasoning_content": "reasoning", "thinking": "reasoning",
}  # fmt: skip
LOG = logging.getLogger(__name__)
_SHOWN = 200  # characters of a prompt's end that may begin a part of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """More of an answer: of what is said or thought, or a whole call."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How a family writes its answers."""

    template: Mapping[str, Any]  # for transformers' parser
    call: dict[str, Any] = field(default_factory=dict)  # how a grammar writes a call; empty where none does
    tags: Mapping[str, str] = field(default_factory=dict)  # how a call is XML; empty where it is not
    answer: Mapping[str, Any] = field(default_factory=dict)  # marks before an answer, where all words have some
    thinks: bool = False  # whether the chat template knows of thoughts
    after_calls: str = ""  # a pattern of what stands behind the last of several calls
    tokens: Mapping[str, int] = field(default_factory=dict)  # marks that are one token -> its id
    plain_tokens: Mapping[str, int] = field(default_factory=dict)  # the same of added ones that control nothing

    def without_calls(self) -> AnswerFormat:
        """Return the same for answers that have no tools to call."""
        fields = {name: field for name, field in self.template["fields"].items() if "call" not in name}
        return AnswerFormat(template={**self.template, "fields": fields})

    def parts(self) -> list[ResponseTemplateField]:
        """Return the parts that an answer may have."""
        return _loaded_parts(json.dumps(self.template))


@functools.lru_cache(maxsize=32)
def _loaded_parts(template: str) -> list[ResponseTemplateField]:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return list(load_response_template(json.loads(template)).fields.values())


def answer_format_of(tokenizer: PreTrainedTokenizerBase) -> AnswerFormat | None:
    """Return the format of a model's answers; None where they have no parts."""
    text = template_text(tokenizer)
    own = getattr(tokenizer, "response_template", None)
    found = next((known for known in _known_formats() if all(mark in text for mark in known["markers"])), None)
    if own is not None:
        found = {"fields": own["fields"]}
    if found is None:
        return None
    fields, call, answer = found["fields"], found.get("call", {}), found.get("answer", {})
    added, thought = tokenizer.added_tokens_decoder, fields.get("reasoning", {})
    values = [thought.get("open", ""), thought.get("close", ""), *call.values(), *answer.values()]
    marks = "\n".join(map(str, values))
    return AnswerFormat(
        template={"start_anchor": _NO_ANCHOR, "fields": fields} if own is None else own,
        call=call,
        answer=answer,
        thinks=bool(answer) or any(str(thought[name]) in text for name in ("open", "close") if thought.get(name)),
        tags=found.get("tags", {}),
        after_calls=found.get("after_calls", ""),
        tokens={one.content: token for token, one in added.items() if one.content in marks},
        plain_tokens={one.content: token for token, one in added.items() if not one.special},
    )


@functools.cache
def _known_formats() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_FORMATS.read_text(encoding="utf-8"))
    return found


class AnswerReader:
    """The parts of one answer, as its text comes."""

    def __init__(
        self,
        answer_format: AnswerFormat | None,
        *,
        prompt_end: str,
        tools: Sequence[Tool] = (),
        has_one_call: bool = False,
        ends_with_words: bool = False,
    ) -> None:
        """Begin after a prompt, whose end may have begun what the model thinks.

        What follows the first call is no part of an answer that has one call. Where an answer `ends_with_words`, marks
        after its first word are words.
        """
        self.num_calls, self._has_one_call, self._ends_with_words = 0, has_one_call, ends_with_words
        self._text, self._at, self._said = "", 0, 0  # what was written, up to where it is read, and is out
        self.thoughts: list[tuple[int, int]] = []  # where in the text what is thought stands, blanks and all
        self._is_new, self._is_after_call = True, False
        self._spoken = set[str]()  # the kinds of parts that there were
        self._open: ResponseTemplateField | None = None  # what is said or thought between marks
        self._call: tuple[int, Body] | None = None  # where the call under way begins
        self._format = answer_format if answer_format is None or tools else answer_format.without_calls()
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._fields = [] if self._format is None else self._format.parts()
        if self._format is not None and (begun := _begun(self._format, prompt_end)):
            self._open = next(found for found in self._fields if begun in (found.open_literals or ()))

    @property
    def is_thinking(self) -> bool:
        """Return whether what comes next is thought."""
        return self._kind == "reasoning"

    @property
    def is_done(self) -> bool:
        """Return whether nothing more is read: there was the one call that there may be."""
        return self._has_one_call and self.num_calls > 0

    @property
    def _kind(self) -> Literal["content", "reasoning"]:
        return "content" if self._open is None else _KINDS[self._open.name]

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that a further piece of text completes."""
        self._text += text
        return list(self._read(is_end=False)) if text else []

    def end(self) -> list[AnswerPart]:
        """Return the rest, at the end of the text."""
        return list(self._read(is_end=True))

    def _read(self, *, is_end: bool) -> Iterator[AnswerPart]:
        while not self.is_done:
            if self._call is not None:
                parts = self._read_call(*self._call, is_end=is_end)
                if parts is None:
                    return
                yield from parts
            elif self._is_after_call and (skipped := self._section_end(is_end=is_end)):
                if skipped.partial:
                    return
                self._at = self._said = skipped.end()
            else:
                fields = [] if self._ends_with_words and "content" in self._spoken else self._fields
                mark = next_mark(self._text, self._at, fields, self._open, is_end=is_end)
                is_last = is_end and isinstance(mark, int)
                yield from self._words(mark if isinstance(mark, int) else mark.start, is_last=is_last)
                if isinstance(mark, int):
                    return
                if not (fields and self._ends_with_words and "content" in self._spoken and self._open is None):
                    self._pass(mark)

    def _section_end(self, *, is_end: bool) -> Any:
        """Return the mark behind the last call where a family has one, perhaps a part of it."""
        pattern = self._format.after_calls if self._format else ""
        found = pattern_of(pattern).match(self._text, self._at, partial=not is_end) if pattern else None
        self._is_after_call = found is not None and found.partial
        return found

    def _words(self, stop: int, *, is_last: bool = False) -> Iterator[AnswerPart]:
        """Yield what is said or thought up to a place; blanks at a part's beginning wait for what they are before.

        Words that an answer begins with keep them: an answer of words alone is the text, blank for blank.
        """
        text, self._at, kind = self._text[self._said : stop], stop, self._kind
        if kind == "reasoning":
            is_more = self.thoughts and self.thoughts[-1][1] >= self._said
            self.thoughts.append((self.thoughts.pop()[0] if is_more else self._said, stop))
        is_whole = self._said == 0 and self._open is None
        if self._is_new and not text.strip() and not (is_whole and is_last):
            return
        if (
            self._is_new
            and not is_whole
            and (kind == "reasoning" or kind not in self._spoken or self._open is not None)
        ):
            join = self._open.join if self._open is not None and kind in self._spoken else None
            text = (join or "") + text.lstrip()  # lines between the parts are none of their own
        self._said, self._is_new = stop, False
        self._spoken.add(kind)
        if text:
            yield AnswerPart(kind=kind, text=text)

    def _pass(self, mark: Mark) -> None:
        """Go on behind a mark."""
        field = mark.opens
        if field is not None and field.name not in _KINDS:
            tags = self._format.tags if self._format else {}
            self._call = mark.start, call_body(field, tags, mark.captures, mark.end)
            return
        self._at = self._said = mark.end
        self._is_new = self._is_new or field is not None or self._open is not None
        self._open = field

    def _read_call(self, start: int, body: Body, *, is_end: bool) -> list[AnswerPart] | None:
        """Return the calls that a body is of, None while it is open; what is no call is said as it was written."""
        behind = max(body.begin, start + 1)  # what follows the mark is read anew
        try:
            end = body.scan(self._text, is_end=is_end)
            if end is None and not is_end:
                return None
            if end is not None:
                behind = end
                parts = self._calls(body.function(self._text), body.earlier)
                self._call, self._at, self._said, self._is_new, self._is_after_call = None, end, end, True, True
                return parts
        except Exception:  # nothing that a model writes ends an answer; what is nested without end is no ValueError
            LOG.debug("what looks like a call is none", exc_info=True)
        self._call = None
        return list(self._words(behind))

    def _calls(self, functions: Any, beside: str) -> list[AnswerPart]:
        """Return the parts of functions to be called, and what stands beside; raises ValueError where one is none."""
        found = [call_values(one, self._schemas) for one in (functions if isinstance(functions, list) else [functions])]
        if not found:
            raise ValueError("no call")
        parts = [AnswerPart(kind="content", text=beside)] if beside else []
        for name, arguments, others in found[:1] if self._has_one_call else found:
            parts += [AnswerPart(kind="content", text=others)] if others else []
            parts.append(AnswerPart(kind="call", call=ToolCall(name=name, arguments=arguments)))
            self.num_calls += 1
        return parts


def _begun(answer_format: AnswerFormat, prompt_end: str) -> str:
    """Return the mark with which the prompt has begun a part of the answer; empty where it has not."""
    end = prompt_end[-_SHOWN:].rstrip()
    for name, found in answer_format.template["fields"].items():
        opened = found.get("open")
        if name in _KINDS and isinstance(opened, str) and end.endswith(opened.rstrip()):
            return opened
    return ""
