"""Answers as models of each family may write them: calls, words and thoughts, right ones and odd ones, drawn at random.

Every word is unlike all others (`zq7z`), so that one which is lost, or comes twice, is seen.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from edgespec.chat.answer import AnswerFormat, answer_format_of

_SCHEMA = {
    "type": "object",
    "$defs": {"Days": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "At": {"type": "object"}},
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/Days"},
        "at": {"allOf": [{"$ref": "#/$defs/At"}]},
    },
}
NAMES = ("weather", "sun-rise.of")
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in NAMES]
BEGIN, END, SEP, CALLS, CALLS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("call\u2581begin", "call\u2581end", "sep", "calls\u2581begin", "calls\u2581end")
)
DSML = "\uff5cDSML\uff5c"
MARKS = (
    f"<{DSML}function_calls>", f"</{DSML}function_calls>", f'<{DSML}invoke name="weather">', f"</{DSML}invoke>",
    f'<{DSML}parameter name="city" string="true">', f"</{DSML}parameter>", f"</{DSML}tool_calls>", DSML,
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]",
    "<|python_tag|>", "<function=weather>", "</function>", "<parameter=city>", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>",
    "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="weather">', "</invoke>",
    '<parameter name="city">', "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", BEGIN, END, SEP, CALLS, CALLS_END, "```json\n", "```",
    "<|tool_call>", "<tool_call|>", "<|channel>thought\n", "<channel|>", '<|"|>', "<|channel|>", "<|message|>",
    "<|end|>", "<|start|>assistant", "<|call|>", "<|return|>", "<|constrain|>json", " to=functions.weather",
    "<|tool_call_start|>", "<|tool_call_end|>", "call:weather{",
    '{"name": "weather"', '{"name": "weather", "arguments": {}}', "{", "}",
    "[", "]", '"', "\\", "\n", "\\n", "\\u00e9", "\\ud83d", "'", ":", ",", " ", "\t", "\u2028",
    "\x00", "é", "😀", "null", "NaN", "=", "<", ">",
)  # fmt: skip
ODD_ARGUMENTS = (
    '"{0}"', '""', "null", "[1, 2]", '["{0}"]', '{{"city": NaN, "a": "{0}"}}', '{{"city": -Infinity, "a": "{0}"}}',
    "5", "true", '{{"city": "\\ud83d{0}"}}', '{{"city": "{0}", "city": "x"}}', '"{{\\"city\\": \\"{0}\\"}}"',
    "{{'city': '{0}'}}",
    '{{"city": "{0}",}}', '{{"city": "a\n{0}"}}', '{{"days": 1e999, "a": "{0}"}}', '{{"days": "2", "a": "{0}"}}',
    "{{{0}}}", '{{"city": "{0}"', '{{"at": {{"a": [{{"b": "{0}"}}]}}}}', '{{"\\ud83d": "{0}"}}',
    '{{"days": 12345678901234567890, "a": "{0}"}}',
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a model has written."""

    text: str
    prompt_end: str  # that may have begun a thought
    finish: str  # stop | length | context
    has_one_call: bool
    words: Sequence[str]  # that are whole in the text
    meant: Sequence[tuple[str, Any]] | None  # the calls, where nothing is odd


Write = Callable[[str, str, Mapping[str, Any] | None], str]  # of a call: its name, its JSON, and its values where right


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family writes."""

    name: str
    format: AnswerFormat
    write: Write
    own_marks: tuple[str, ...] = ()  # that end a value, or what a value may not hold
    calls: Callable[[Sequence[str]], str] = "".join
    says: str = "{}"  # around words
    is_alone: bool = False  # a call is the whole answer
    is_xml: bool = False


def _format(name: str, markers: str) -> AnswerFormat:
    found = answer_format_of(SimpleNamespace(chat_template=markers, added_tokens_decoder={}))  # type: ignore[arg-type]
    assert found is not None, name
    return found


def _tags(open_: str, close: str) -> Callable[[Mapping[str, Any] | None, str], str]:
    def written(values: Mapping[str, Any] | None, raw: str) -> str:
        if values is None:
            return raw
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        return "".join(f"{open_.format(key)}{value}{close}" for key, value in texts.items())

    return written


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(part)}" for key, part in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma, value)) + "]"
        case _:
            return json.dumps(value)


def _python(value: Any) -> str:
    match value:
        case None | True | False:
            return str(value)
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)}: {_python(part)}" for key, part in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_python, value)) + "]"
        case _:
            return json.dumps(value)


def _dsml(name: str, given: str, values: Mapping[str, Any] | None) -> str:
    written = (
        given
        if values is None
        else "".join(
            f'<{DSML}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</{DSML}parameter>\n"
            for key, value in values.items()
        )
    )
    return f'<{DSML}invoke name="{name}">\n{written}</{DSML}invoke>\n'


_QWEN = _tags("<parameter={}>\n", "\n</parameter>\n")
_GLM = _tags("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
_MINIMAX = _tags('<parameter name="{}">', "</parameter>\n")
_OWN = {"start_anchor": "\x00"}
FAMILIES = [
    Family(name="harmony", format=_format("harmony", "<|channel|>"),
           says="<|channel|>final<|message|>{}<|end|><|start|>assistant",
           write=lambda name, given, _: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{given}"
           "<|call|><|start|>assistant"),
    Family(name="gemma 4", format=_format("gemma 4", "<|tool_call>"), own_marks=('<|"|>',),
           write=lambda name, given, values: f"<|tool_call>call:{name}"
           f"{given if values is None else _gemma(values)}<tool_call|>"),
    Family(name="qwen 3 coder", format=_format("qwen", "<tool_call><function="), is_xml=True,
           own_marks=("</", "<p", "<tool", "<f"),
           write=lambda name, given, values:
           f"<tool_call>\n<function={name}>\n{_QWEN(values, given)}</function>\n</tool_call>"),
    Family(name="glm", format=_format("glm", "<tool_call><arg_key>"), is_xml=True, own_marks=("</", "<arg"),
           write=lambda name, given, values: f"<tool_call>{name}\n{_GLM(values, given)}</tool_call>"),
    Family(name="minimax", format=_format("minimax", "<minimax:tool_call>"), is_xml=True, own_marks=("</", "<p"),
           write=lambda name, given, values: f'<invoke name="{name}">\n{_MINIMAX(values, given)}</invoke>\n',
           calls=lambda calls: f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"),
    Family(name="deepseek 3.2", format=_format("deepseek 3.2", f"{DSML} function_calls"), is_xml=True,
           own_marks=("</", f"<{DSML}p"), write=lambda name, given, values: _dsml(name, given, values),
           calls=lambda calls: f"\n\n<{DSML}function_calls>\n{''.join(calls)}</{DSML}function_calls>"),
    Family(name="deepseek 4", format=_format("deepseek 4", DSML), is_xml=True,
           own_marks=("</", f"<{DSML}p"), write=lambda name, given, values: _dsml(name, given, values),
           calls=lambda calls: f"\n\n<{DSML}tool_calls>\n{''.join(calls)}</{DSML}tool_calls>"),
    Family(name="kimi", format=_format("kimi", "<|tool_call_begin|>"),
           write=lambda name, given, _:
           f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{given}<|tool_call_end|>",
           calls=lambda calls: f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"),
    Family(name="deepseek 3 and r1", format=_format("deepseek 3", f"{BEGIN} ```json"),
           write=lambda name, given, _: f"{BEGIN}function{SEP}{name}\n```json\n{given}\n```{END}",
           calls=lambda calls: CALLS + "\n".join(calls) + CALLS_END),
    Family(name="deepseek 3.1", format=_format("deepseek 3.1", BEGIN),
           write=lambda name, given, _: f"{BEGIN}{name}{SEP}{given}{END}",
           calls=lambda calls: CALLS + "".join(calls) + CALLS_END),
    Family(name="mistral since 2025", format=_format("mistral", "[TOOL_CALLS] [ARGS]"),
           write=lambda name, given, _: f"[TOOL_CALLS]{name}[ARGS]{given}"),
    Family(name="mistral", format=_format("mistral", "[TOOL_CALLS]"),
           write=lambda name, given, _: f'{{"name": "{name}", "arguments": {given}}}',
           calls=lambda calls: f"[TOOL_CALLS] [{', '.join(calls)}]"),
    Family(name="hermes and qwen", format=_format("hermes", "<tool_call>"),
           write=lambda name, given, _: f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'),
    Family(name="llama 3", format=_format("llama 3", '<|start_header_id|> "parameters"'), is_alone=True,
           write=lambda name, given, _: f'{{"name": "{name}", "parameters": {given}}}'),
    Family(name="template of its own, JSON", format=AnswerFormat(template={**_OWN, "fields": {
               "thinking": {"open": "<think>", "close": "</think>"},
               "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
                              "transform": {"type": "function", "function": "{content}"}},
               "content": {}}}),
           write=lambda name, given, _: f'<tool_call>{{"name": "{name}", "arguments": {given}}}</tool_call>'),
    Family(name="template of its own, Python", format=AnswerFormat(template={**_OWN, "fields": {
               "tool_calls": {"open": "<|tool_call_start|>", "close": "<|tool_call_end|>",
                              "content": "python-call-list",
                              "repeats": True, "transform_each": True,
                              "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}}},
               "content": {}}}), own_marks=("<|tool_call_end|>",),
           write=lambda name, given, values: f"{name}({given})" if values is None else
           f"{name}({', '.join(f'{key}={_python(value)}' for key, value in values.items())})",
           calls=lambda calls: f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"),
]  # fmt: skip


class _Writer:
    """Draws the parts of one sample."""

    def __init__(self, family: Family, draw: random.Random) -> None:
        self.family, self.draw = family, draw
        self.is_odd = draw.random() < 0.6
        self.num_words = 0
        self.meant: list[tuple[str, Any]] = []

    def word(self) -> str:
        self.num_words += 1
        return f"zq{self.num_words}z"

    def words(self) -> str:
        parts = [self.word() for _ in range(self.draw.randint(0, 4))]
        if self.is_odd and self.draw.random() < 0.4:
            parts.insert(self.draw.randint(0, len(parts)), self.draw.choice(MARKS))
        return self.draw.choice([" ", "\n", ", "]).join(parts)

    def value(self) -> str:
        """Return a text with any marks in it, but for those that end it."""
        parts = [self.word(), *(self.draw.choice(MARKS) for _ in range(self.draw.choice([0, 0, 1, 3])))]
        self.draw.shuffle(parts)
        text = "".join(parts)
        if self.is_odd and self.draw.random() < 0.5:
            return text
        for mark in self.family.own_marks:
            text = text.replace(mark, "")
        return text.strip() if self.family.is_xml else text

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {"city": self.value()} if self.draw.random() < 0.8 else {}
        if self.draw.random() < 0.5:
            found["days"] = self.draw.choice([2, None, -7, 10**12])
        if self.draw.random() < 0.3:
            found["at"] = {"x": [1, 2.5, {"y": self.word()}], "z": True}
        if self.draw.random() < 0.2:
            found[self.word()] = self.value()
        return found

    def call(self) -> str:
        name, values = self.draw.choice(NAMES), self.values()
        if self.is_odd and self.draw.random() < 0.4:
            return self.family.write(name, self.draw.choice(ODD_ARGUMENTS).format(self.word()), None)
        self.meant.append((name, values))
        indent, marks = self.draw.choice([(None, None), (None, (",", ":")), (2, None)])
        given = json.dumps(values, ensure_ascii=self.draw.random() < 0.5, indent=indent, separators=marks)
        return self.family.write(name, given, values)

    def calls(self) -> str:
        found = [self.call() for _ in range(self.draw.choice([1, 1, 1, 1, 2, 3]) if not self.family.is_alone else 1)]
        return self.family.calls(found)

    def changed(self, text: str) -> str:
        """Return a text with something left out of it, or put into it."""
        for _ in range(self.draw.randint(0, 3)):
            place = self.draw.randint(0, len(text))
            put = self.draw.choice(MARKS) if self.draw.random() < 0.5 else ""
            text = text[:place] + put + text[place + (0 if put else self.draw.choice([1, 1, 5, 15])) :]
        return text


def drawn(family: Family, draw: random.Random) -> Sample:
    """Return a sample of a family."""
    writer, parts = _Writer(family, draw), list[str]()
    thought = next((found for name, found in family.format.template["fields"].items()
                    if name in ("reasoning", "thinking")), None)  # fmt: skip
    begins_thinking = thought is not None and draw.random() < 0.3
    if thought is not None and (begins_thinking or draw.random() < 0.3):
        inside = f"{writer.words()}\n{writer.words()}"
        if writer.is_odd and draw.random() < 0.3:
            before = len(writer.meant)
            inside += writer.calls()  # which is thought
            del writer.meant[before:]
        begin = "" if begins_thinking else thought["open"]
        parts.append(f"{begin}{inside}{thought['close']}{'<|start|>assistant' if family.name == 'harmony' else ''}")
    for _ in range(draw.randint(1, 3)):
        is_call = draw.random() < 0.6
        if family.is_alone:
            parts = [writer.calls() if is_call else writer.words()]
            break
        parts.append(writer.calls() if is_call else family.says.format(writer.words()))
        parts.append(draw.choice(["", "", "\n", " \n\n"]) if family.name != "harmony" else "")
    text = "".join(parts)
    finish = draw.choice(["stop", "stop", "stop", "length", "context"])
    if writer.is_odd:
        text = writer.changed(text)
    is_cut = finish != "stop" and draw.random() < 0.9
    if is_cut:
        text = text[: draw.randint(0, len(text))]
    words = [f"zq{number}z" for number in range(1, writer.num_words + 1)]
    return Sample(
        text=text,
        prompt_end=f"assistant\n{thought['open']}\n" if begins_thinking and thought else "assistant\n",
        finish=finish,
        has_one_call=draw.random() < 0.1,
        words=[word for word in words if text.count(word) == 1],
        meant=None if writer.is_odd or is_cut else writer.meant,
    )
