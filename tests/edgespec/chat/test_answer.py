"""Answers are told apart in the form of each family, however their text is cut into pieces."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.chat.answer import AnswerReader, answer_format_of

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = ("weather", {"city": "Paris", "days": 2})
BEGIN, END, SEP, CALLS, CALLS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("call\u2581begin", "call\u2581end", "sep", "calls\u2581begin", "calls\u2581end")
)


def _dsml(text: str) -> str:
    return text.replace("|DSML|", "\uff5cDSML\uff5c")


GIVEN = '{"city": "Paris", "days": 2}'
# What a family's chat template holds -> an answer that thinks, speaks and calls, as far as the family does
FAMILIES: dict[str, tuple[str, str, str, str]] = {
    "hermes": (
        "<think><tool_call>",
        "<think>\nHm.\n</think>\n\nLet me see.\n"
        f'<tool_call>\n{{"name": "weather", "arguments": {GIVEN}}}\n</tool_call>',
        "Hm.\n", "Let me see.",
    ),
    "qwen 3.5": (
        "<tool_call> <function=",
        "<think>\nHm.\n</think>\n\nLet me see.\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "Hm.\n", "Let me see.",
    ),
    "glm": (
        "<tool_call> <arg_key>",
        "<think>Hm.</think>Let me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "Hm.", "Let me see.",
    ),
    "minimax": (
        "<minimax:tool_call>",
        '<think>Hm.</think>Let me see.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris'
        '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        "Hm.", "Let me see.",
    ),
    "deepseek 3.2": (
        "\uff5cDSML\uff5c function_calls",
        "<think>Hm.</think>Let me see.\n\n" + _dsml('<|DSML|function_calls>\n<|DSML|invoke name="weather">\n'
        '<|DSML|parameter name="city" string="true">Paris</|DSML|parameter>\n'
        '<|DSML|parameter name="days" string="false">2</|DSML|parameter>\n</|DSML|invoke>\n</|DSML|function_calls>'),
        "Hm.", "Let me see.",
    ),
    "kimi": (
        "<|tool_call_begin|>",
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{GIVEN}<|tool_call_end|><|tool_calls_section_end|>",
        "", "Let me see.",
    ),
    "deepseek 3": (
        f"{BEGIN} ```json",
        f"Let me see.{CALLS}{BEGIN}function{SEP}weather\n```json\n{GIVEN}\n```{END}{CALLS_END}",
        "", "Let me see.",
    ),
    "deepseek 3.1": (BEGIN, f"Let me see.{CALLS}{BEGIN}weather{SEP}{GIVEN}{END}", "", "Let me see."),
    "mistral": ("[TOOL_CALLS]", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {GIVEN}}}]', "", ""),
    "mistral since 2025": (
        "[TOOL_CALLS] [ARGS]", f"[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS]weather[ARGS]{GIVEN}", "Hm.", "Let me see."
    ),
    "llama 3": ('<|start_header_id|> "parameters"', f'{{"name": "weather", "parameters": {GIVEN}}}', "", ""),
    "gemma 4": (
        "<|tool_call>",
        '<|channel>thought\nHm.<channel|>Let me see.<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
        "Hm.", "Let me see.",
    ),
    "harmony": (
        "<|channel|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{GIVEN}",
        "Hm.", "Let me see.",
    ),
}  # fmt: skip


def format_of(template: str) -> Any:
    tokenizer: Any = SimpleNamespace(chat_template=template, added_tokens_decoder={})
    return answer_format_of(tokenizer)


def read(answers: Any, pieces: Any, *, prompt_end: str = "", tools: Any = TOOLS) -> dict[str, Any]:
    reader = AnswerReader(answers, prompt_end=prompt_end, tools=tools)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
    return {
        "reasoning": "".join(part.text for part in parts if part.kind == "reasoning"),
        "content": "".join(part.text for part in parts if part.kind == "content"),
        "calls": [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call is not None],
    }


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_answer_has_its_parts(family: str, size: int) -> None:
    template, text, reasoning, content = FAMILIES[family]
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(format_of(template), pieces) == {"reasoning": reasoning, "content": content, "calls": [CALL]}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_follow_each_other(family: str) -> None:
    template, text, _, content = FAMILIES[family]
    if family in {"mistral", "llama 3"}:  # a list of calls, and one call an answer
        return
    marks = {"harmony": "<|call|><|start|>assistant<|channel|>commentary to", "mistral since 2025": "[TOOL_CALLS]"}
    start = text.index(content) + len(content) if family != "harmony" else text.index("<|channel|>commentary to")
    joined = "<|call|><|start|>assistant" if family in marks and family == "harmony" else ""
    assert read(format_of(template), [text + joined + text[start:]])["calls"] == [CALL, CALL]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_was_cut_is_said_as_it_was_written(family: str) -> None:
    template, text, _, _ = FAMILIES[family]
    found = read(format_of(template), list(text[: text.index("Paris") + 2]))
    assert found["calls"] == [] or found["calls"][0][1] != CALL[1]
    assert "Pa" in found["content"] or "Pa" not in text[: text.index("Paris")]


def call_of(family: str, arguments: str) -> str:
    """One call of a family, whose arguments are written as JSON."""
    text = FAMILIES[family][1].replace(GIVEN, arguments)
    begins = ("<tool_call>", "<|start|>assistant<|channel|>commentary to", "<|tool_calls_s", CALLS, "[TOOL_CALLS]")
    return text[text.index(next((mark for mark in begins if mark in text), "")) :]


JSON_CALLS = [family for family in FAMILIES if GIVEN in FAMILIES[family][1]]
NO_OBJECTS = ('"hello"', "[1, 2]", "5", '{"days": NaN}', '"[1]"')
OBJECTS = {"null": {}, '""': {}, '" "': {}, "{}": {}, '"{\\"days\\": 1}"': {"days": 1},
           '{"city": "\\ud83d", "days": "2"}': {"city": "\ufffd", "days": 2}, '{"days": 1, "days": 2}': {"days": 2},
           '{"days": 1e999}': {"days": 1.7976931348623157e308}}  # fmt: skip


@pytest.mark.parametrize("family", JSON_CALLS)
def test_arguments_are_an_object_or_the_call_is_said_as_it_was_written(family: str) -> None:
    for written in NO_OBJECTS:
        text = call_of(family, written)
        for pieces in ([text], list(text)):
            found = read(format_of(FAMILIES[family][0]), pieces)
            assert found["calls"] == []
            assert written in found["content"]
    for written, wanted in OBJECTS.items():
        text = call_of(family, written)
        for pieces in ([text], list(text)):
            assert read(format_of(FAMILIES[family][0]), pieces)["calls"] == [("weather", wanted)], written


def test_arguments_that_are_left_out_are_none() -> None:
    for text in ('{"name": "weather"}', '{"name": "weather", "arguments": null, "id": "a", "type": "function"}'):
        assert read(format_of("<tool_call>"), [f"<tool_call>{text}</tool_call>"])["calls"] == [("weather", {})]
    for name in ('""', "5", "null", '["weather"]'):
        text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
        assert read(format_of("<tool_call>"), [text]) == {"reasoning": "", "content": text, "calls": []}


def test_what_stands_beside_a_calls_arguments_is_said() -> None:
    text = '<tool_call>{"name": "weather", "parameters": {"days": 2}, "why": "I like it."}</tool_call>'
    found = read(format_of("<tool_call>"), [text])
    assert found == {"reasoning": "", "content": '{"why": "I like it."}', "calls": [("weather", {"days": 2})]}


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_marks_within_arguments_are_a_part_of_them(family: str, size: int) -> None:
    template, text, _, _ = FAMILIES[family]
    marks = f"{text[-14:]} <tool_call> [TOOL_CALLS] </parameter> <|call|> </think> {END} ``` it's {{ }} [ ]"
    marks = marks.replace('"', "'").replace("\n", " ").replace("'}", "").replace("</arg_value> </tool_call>", "")
    if family in ("qwen 3.5", "minimax", "glm", "deepseek 3.2"):
        marks = marks.replace(text[-14:], "")
    whole = text.replace("Paris", marks)
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert read(format_of(template), pieces)["calls"] == [("weather", {"city": marks, "days": 2})]


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_call_without_its_end_ends_with_its_json(size: int) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {GIVEN}}}'
    for text, content in ((call, ""), (f"{call}\n</tool_c", ""), (f"{call}{call} Done.", "Done."), (f"{call}\n", "")):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        found = read(format_of("<tool_call>"), pieces)
        assert found == {"reasoning": "", "content": content, "calls": [CALL] * text.count("<tool_call>")}


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_call_that_is_none_does_not_take_the_next_with_it(size: int) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {GIVEN}}}</tool_call>'
    for wrong in ("<tool_call> is the mark. ", '<tool_call>{"name": "sun", "arguments": {"city": "\n"}}</tool_call>',
                  "<tool_call>{'name': 'weather'}</tool_call>", '<tool_call>{"name": "weather", "argu<tool_call>',
                  '<tool_call>{"name": "weather"; ', "<tool_call>" * 3):  # fmt: skip
        text = f"{wrong}{call}"
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        found = read(format_of("<tool_call>"), pieces)
        assert found["content"] == wrong.rstrip()
        assert found["calls"] == [CALL]


def test_tags_that_are_written_otherwise_are_said() -> None:
    answers = format_of("<tool_call> <function=")
    value = "<parameter=city>\nParis\n</parameter>\n"
    for inside in (f"hello {value}", f"{value}hello", '{"city": "Paris"}', value[:-4]):
        text = f"<tool_call>\n<function=weather>\n{inside}</function>\n</tool_call>"
        assert read(answers, list(text)) == {"reasoning": "", "content": text, "calls": []}
    for begin, end in (("", "</tool_call>"), ("<tool_call>", ""), ("", "")):  # as Qwen 3 Coder writes now and then
        text = f"So:\n{begin}<function=weather>\n{value}</function>{end}"
        calls = [("weather", {"city": "Paris"})]
        assert read(answers, list(text)) == {"reasoning": "", "content": "So:", "calls": calls}


def test_lines_of_tags_may_end_as_windows_has_them() -> None:
    text = (
        "<tool_call>\r\n<function=weather>\r\n<parameter=city>\r\nParis\r\nLyon\r\n</parameter>\r\n"
        "</function>\r\n</tool_call>"
    )
    calls = [("weather", {"city": "Paris\r\nLyon"})]
    assert read(format_of("<tool_call> <function="), list(text)) == {"reasoning": "", "content": "", "calls": calls}


def test_a_key_that_comes_again_has_the_last_value_and_the_earlier_one_is_said() -> None:
    values = "<parameter=city>\nRome\n</parameter>\n<parameter=city>\nParis\n</parameter>\n"
    for markers, text in (
        ("<tool_call> <function=", f"<tool_call>\n<function=weather>\n{values}</function>\n</tool_call>"),
        ("<tool_call>", '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "city": "Paris"}}</tool_call>'),
    ):
        found = read(format_of(markers), list(text))
        assert found == {"reasoning": "", "content": '{"city": "Rome"}', "calls": [("weather", {"city": "Paris"})]}


def test_words_between_marks_are_said_where_all_words_should_have_marks() -> None:
    text = "Hi.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert read(format_of("<|channel|>"), list(text))["content"] == "Hi.\nYes."


def test_behind_the_first_word_of_an_answer_that_ends_with_words_no_mark_counts() -> None:
    text = '<think>Hm.</think>{"a": "<think> <tool_call>{}"}'
    reader = AnswerReader(format_of("<tool_call><think>"), prompt_end="", tools=TOOLS, ends_with_words=True)
    parts = [part for letter in text for part in reader.feed(letter)] + reader.end()
    assert "".join(part.text for part in parts if part.kind == "content") == text.partition("</think>")[2]


def test_what_the_prompt_began_to_think_is_thought() -> None:
    found = read(format_of("<think>"), ["Hm.", "</th", "ink>\n\nYes."], prompt_end="<|im_start|>assistant\n<think>\n")
    assert (found["reasoning"], found["content"]) == ("Hm.", "Yes.")


def test_without_tools_a_call_is_a_text() -> None:
    text = '{"name": "weather", "parameters": {}}'
    assert read(format_of('<|start_header_id|> "parameters"'), [text], tools=[])["content"] == text
    assert read(format_of("nothing of that"), [text])["content"] == text


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_follows_the_one_call_that_there_may_be_is_no_part(size: int) -> None:
    answers = format_of("<tool_call>")
    call = f'<tool_call>{{"name": "weather", "arguments": {GIVEN}}}</tool_call>'
    text = f"I look.{call} Again.{call}"
    for has_one_call in (True, False):
        reader = AnswerReader(answers, prompt_end="", tools=TOOLS, has_one_call=has_one_call)
        parts = [part for start in range(0, len(text), size) for part in reader.feed(text[start : start + size])]
        parts += reader.end()
        assert sum(part.kind == "call" for part in parts) == reader.num_calls == (1 if has_one_call else 2)
        assert ("Again." in "".join(part.text for part in parts)) != has_one_call
        assert reader.is_done == has_one_call


@pytest.mark.parametrize("text", ["\n  def f():\n", "  ", "\n\n", " said \n ", "\nsaid"])
@pytest.mark.parametrize("has_marks", [False, True])
def test_an_answer_of_words_alone_is_the_text_blank_for_blank(text: str, has_marks: bool) -> None:
    answers = format_of("<think></think><tool_call>") if has_marks else None
    for size in (1, 2, len(text)):
        reader = AnswerReader(answers, prompt_end="", tools=[])
        parts = [part for start in range(0, len(text), size) for part in reader.feed(text[start : start + size])]
        assert "".join(part.text for part in [*parts, *reader.end()]) == text
