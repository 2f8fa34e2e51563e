"""An answer's parts, told apart while it is written: what is said, what was thought before, calls of tools.

Transformers' parser does it, by a description of the form that a model's family writes (`answer_forms.json`): the
tokenizer's own `response_template`, or the first form whose marks stand in the chat template. A call that is none,
for example because the text was cut in it, is said as it was written: nothing is lost.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": schema}}
_FORMS = Path(__file__).with_name("answer_forms.json")
_NO_ANCHOR = "\x00"  # the prompt's last words are given alone, and need none
_KINDS: dict[str, Literal["content", "reasoning"]] = {
    "content": "content", "reasoning": "reasoning", "reasoning_content": "reasoning", "thinking": "reasoning",
}  # fmt: skip
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
class AnswerForm:
    """How a family writes its answers."""

    template: Mapping[str, Any]  # for transformers' parser
    call: dict[str, Any] = field(default_factory=dict)  # how a call is JSON; empty where it is not
    tokens: Mapping[str, int] = field(default_factory=dict)  # marks that are one token -> its id
    plain_tokens: Sequence[int] = ()  # that were added to the tokenizer, and control nothing

    def without_calls(self) -> AnswerForm:
        """Return the same for answers that have no tools to call."""
        fields = {name: field for name, field in self.template["fields"].items() if "call" not in name}
        return AnswerForm(template={**self.template, "fields": fields})


def answer_form(tokenizer: PreTrainedTokenizerBase) -> AnswerForm | None:
    """Return the form of a model's answers; None where they have no parts."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return AnswerForm(template=own)
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    found = next((form for form in _known_forms() if all(mark in text for mark in form["markers"])), None)
    if found is None:
        return None
    fields, call = found["fields"], found.get("call", {})
    if not call:
        return AnswerForm(template={"start_anchor": _NO_ANCHOR, "fields": fields})
    added = tokenizer.added_tokens_decoder
    thought = fields.get("reasoning", {})
    marks = {call["mark"], call.get("close"), thought.get("open"), thought.get("close")}
    return AnswerForm(
        template={"start_anchor": _NO_ANCHOR, "fields": fields},
        call=call,
        tokens={found.content: token for token, found in added.items() if found.content in marks},
        plain_tokens=[token for token, found in added.items() if not found.special],
    )


@functools.cache
def _known_forms() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_FORMS.read_text(encoding="utf-8"))
    return found


class AnswerReader:
    """The parts of one answer, as its text comes."""

    def __init__(self, form: AnswerForm | None, *, prompt_end: str, tools: Sequence[Tool] = ()) -> None:
        """Begin after a prompt, whose end may have begun what the model thinks."""
        from transformers.utils.chat_parsing import ResponseParser

        self._written, self._num_said = "", 0  # characters of what was written that are out
        self._kind = "content"
        self._parser: Any = None
        if form is not None:
            fitting = form if tools else form.without_calls()
            known: list[Any] = list(tools)
            self._parser = ResponseParser(dict(fitting.template), prefix=_begun(fitting, prompt_end), tools=known)
            self._is_new = True
            for event in self._parser.initial_events:
                self._kind = _KINDS.get(event["field"], self._kind) if event["type"] == "region_open" else self._kind

    @property
    def is_thinking(self) -> bool:
        """Return whether what comes next is thought."""
        return self._kind == "reasoning"

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that a further piece of text completes."""
        self._written += text
        if self._parser is None:
            return [AnswerPart(kind="content", text=text)] if text else []
        return self._read(lambda: self._parser.feed(text))

    def end(self) -> list[AnswerPart]:
        """Return the rest, at the end of the text."""
        return [] if self._parser is None else self._read(lambda: self._parser.finalize()[1])

    def _read(self, events: Any) -> list[AnswerPart]:
        try:
            return list(self._parts(events()))
        except Exception:  # a call that is none: the parser's error says which characters it wanted
            self._parser = None
            rest = self._written[self._num_said :]
            return [AnswerPart(kind="content", text=rest)] if rest else []

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> Iterator[AnswerPart]:
        for event in events:
            kind = _KINDS.get(event["field"])
            if event["type"] == "region_open":
                self._kind, self._is_new = event["field"], True
            elif event["type"] == "region_chunk" and kind is not None:
                self._note(event["text"])
                text = event["text"].lstrip() if self._is_new else event["text"]  # lines between the parts
                self._is_new = self._is_new and not text
                if text:
                    yield AnswerPart(kind=kind, text=text)
            elif event["type"] == "region_chunk":
                pass  # of a call, which is known when it is whole
            elif event["type"] == "region_close":
                self._kind = "content"
                if kind is None:
                    yield from map(_call_part, event["value"] if isinstance(event["value"], list) else [event["value"]])
                    self._num_said = len(self._written)

    def _note(self, text: str) -> None:
        place = self._written.find(text, self._num_said)
        self._num_said = place + len(text) if place >= 0 else self._num_said


def _call_part(value: Mapping[str, Any]) -> AnswerPart:
    function = value["function"]
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return AnswerPart(kind="call", call=ToolCall(name=str(function["name"]), arguments=written))


def _begun(form: AnswerForm, prompt_end: str) -> str:
    """Return the mark with which the prompt has begun a part of the answer; empty where it has not."""
    end = prompt_end[-_SHOWN:].rstrip()
    for name, found in form.template["fields"].items():
        opened = found.get("open")
        if name in _KINDS and isinstance(opened, str) and end.endswith(opened.rstrip()):
            return opened
    return ""
