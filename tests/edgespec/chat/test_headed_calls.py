"""Calls in the forms of eleven families are held to their tools' schemas: JSON behind a name, or tags around values."""

import json
from typing import Any

import pytest

from edgespec.chat.answer import AnswerReader
from edgespec.chat.call_grammar import calls_or_answer, forced_calls, strict_calls
from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import Grammar
from tests.edgespec.chat.test_answer import BEGIN, CALLS, CALLS_END, END, SEP
from tests.edgespec.chat.test_call_grammar import ANSWER, ANY, SUN, Family
from tests.edgespec.text import test_tagged_grammar as tagged
from tests.edgespec.text.test_tagged_grammar import SCHEMA, calls_of, drawn_calls, tool

TEMPLATES = {
    "mistral since 2025": "[TOOL_CALLS] [ARGS] [THINK]", "kimi": "<|tool_call_begin|> <think>",
    "deepseek 3": f"{BEGIN} ```json <think>", "deepseek 3.1": f"{BEGIN} <think>", "harmony": "<|channel|>",
    "gemma 4": "<|tool_call> <|channel>thought\n",
}  # fmt: skip
KIMI = [f"<|tool_{name}|>" for name in ("call_begin", "call_end", "call_argument_begin", "calls_section_begin",
                                        "calls_section_end")]  # fmt: skip
DEEPSEEK = [BEGIN, END, SEP, CALLS, CALLS_END, "<think>", "</think>"]
MARKS = {
    "mistral since 2025": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"], "kimi": [*KIMI, "<think>", "</think>"],
    "deepseek 3": DEEPSEEK, "deepseek 3.1": DEEPSEEK,
    "harmony": [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return")],
    "gemma 4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
}  # fmt: skip
SPECIAL = {"mistral since 2025", "harmony", "gemma 4"}  # whose marks are control tokens
ONE = {  # a call, and one that follows another
    "mistral since 2025": ("[TOOL_CALLS]{}[ARGS]{}", "{0}{0}"),
    "kimi": ("<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
             "<|tool_calls_section_begin|>{0}{0}<|tool_calls_section_end|>"),
    "deepseek 3": (f"{BEGIN}function{SEP}{{}}\n```json\n{{}}\n```{END}", f"{CALLS}{{0}}\n{{0}}{CALLS_END}"),
    "deepseek 3.1": (f"{BEGIN}{{}}{SEP}{{}}{END}", f"{CALLS}{{0}}{{0}}{CALLS_END}"),
    "harmony": ("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}", "{0}"),
    "gemma 4": ("<|tool_call>call:{}{}<tool_call|>", "{0}{0}"),
}  # fmt: skip
SAID = "<|channel|>final<|message|>"
BETWEEN = "<|end|><|start|>assistant"
THOUGHTS = {"gemma 4": ("<|channel>thought\n", "<channel|>"), "mistral since 2025": ("[THINK]", "[/THINK]"),
            "harmony": ("<|channel|>analysis<|message|>", BETWEEN)}  # fmt: skip


ALL = {"kimi": TEMPLATES["kimi"], "qwen": tagged.TEMPLATES["qwen"], **TEMPLATES, **tagged.TEMPLATES}


@pytest.fixture(scope="module", params=[(name, has_tokens) for has_tokens in (True, False) for name in ALL])
def family(request: pytest.FixtureRequest) -> tuple[str, Family]:
    name, has_tokens = request.param
    marks = MARKS.get(name, tagged.MARKS) if has_tokens else ()
    return name, Family(ALL[name], marks=marks, are_special=name in SPECIAL)


def bare(value: Any) -> str:
    """A value as Gemma's chat template writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(value[key])}" for key in sorted(value, key=str.lower)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(bare, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def call(family: str, name: str = "sun", /, **values: Any) -> str:
    arguments = bare(values) if family == "gemma 4" else json.dumps(values)
    return ONE[family][0].format(name, arguments)


def written(family: str, name: str = "sun", /, **values: Any) -> str:
    """An answer that is one call."""
    if family in tagged.CALLS:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        return tagged.written(family, name, **texts)
    return ONE[family][1].replace("\n{0}", "").replace("{0}{0}", "{0}").format(call(family, name, **values))


def two(family: str) -> str:
    """An answer of two calls, where a family has such."""
    if family in tagged.CALLS:
        return "\n".join([written(family, city="Rome")] * 2)
    return ONE[family][1].format(call(family, city="Rome"))


def said(family: str, words: str) -> str:
    return SAID + words if family == "harmony" else words


def test_calls_are_required_or_strict_or_stand_in_place_of_an_answer(family: tuple[str, Family]) -> None:
    name, found = family
    right, wrong = written(name, city="Rome"), written(name, city="Oslo")
    forced = forced_calls(found.format, [SUN], "may come")
    assert found.takes(forced, right)
    assert calls_of(found, [SUN], right) == [("sun", {"city": "Rome"})]
    both = two(name)
    for text in (wrong, said(name, "Hello"), "", written(name), written(name, "any", city="Rome"), right + right):
        assert not found.takes(forced, text), text
    strict = strict_calls(found.format, [SUN, ANY], "may come")
    free = written(name, "any", day=['"<b>\n', {"x": None}, 1.5], other={})
    before = f"<|channel|>commentary<|message|>So: {BETWEEN}" if name == "harmony" else "So: "
    for text in (said(name, ""), said(name, "See: <b>1 < 2</b> {x}\n"), before + right, before + both, free):
        assert found.takes(strict, text), text
    for text in (before + wrong, written(name, "snow", city="Rome"), right[: right.index("Rome")]):
        assert not found.takes(strict, text), text
    assert found.takes(strict, both if name == "harmony" else both + " And so on.")
    answer = calls_or_answer(found.format, [SUN, ANY], ANSWER, "may come")
    for text in (right, both, said(name, '{ "size": 2}'), free):
        assert found.takes(answer, text), text
    for text in (said(name, ""), said(name, "Hello"), said(name, '{"size": 3}'), wrong, f'{right}{{"size": 1}}'):
        assert not found.takes(answer, text), text
    assert name not in tagged.CALLS or not found.takes(answer, before + right)
    assert calls_of(found, [SUN, ANY], both) == [("sun", {"city": "Rome"})] * (1 if name == "harmony" else 2)


def test_calls_come_after_what_is_thought(family: tuple[str, Family]) -> None:
    name, found = family
    if name not in THOUGHTS and "<think>" not in ALL[name]:
        pytest.skip("a template that knows no thoughts")
    opens, closes = THOUGHTS.get(name, ("<think>", "</think>"))
    right = written(name, city="Rome")
    for thought, begun in (("open", ""), ("may come", opens)):
        text = f"{begun}Hm, {{}} {closes}{right}"
        for make in (forced_calls, strict_calls):
            assert found.takes(make(found.format, [SUN], thought), text), make
            assert not found.takes(make(found.format, [SUN], thought), text.replace("Rome", "Oslo"))
        answer = calls_or_answer(found.format, [SUN], ANSWER, thought)
        assert found.takes(answer, text)
        assert found.takes(answer, f"{begun}Hm.{closes}" + said(name, '{"size": 1}'))
        assert not found.takes(answer, f"{begun}Hm.{closes}" + said(name, "Hello"))


RIGHT = {
    "city": "a <b>\n c", "days": 7, "unit": "c", "at": {"x": 1}, "far": None, "name": "Ann", "tags": ["a", "a"],
    "mode": "1", "kind": 5,
}  # fmt: skip
WRONG: list[tuple[str, Any]] = [
    ("days", "x"), ("unit", "k"), ("at", {"x": "1"}), ("far", "far"), ("tags", ["b"]), ("mode", "3"), ("mode", '"1"'),
    ("kind", 6), ("name", 1),
]  # fmt: skip


def test_each_value_is_held_to_its_own_schema(family: tuple[str, Family]) -> None:
    name, found = family
    tools = [tool(SCHEMA, strict=True)]
    grammar = forced_calls(found.format, tools, "may come")
    text = written(name, **RIGHT)
    assert found.takes(grammar, text)
    assert calls_of(found, tools, text) == [("sun", RIGHT)]
    assert not found.takes(grammar, written(name, days=7))  # without what is required
    for key, wrong in WRONG:
        if (name, key) not in {(one, "name") for one in tagged.CALLS}:  # where 1 is a text, too
            assert not found.takes(grammar, written(name, **{"city": "x", key: wrong})), key
    assert not found.takes(grammar, written(name, city="x", other="y"))
    if name in tagged.CALLS:
        of_call, of_value = tagged.CALLS[name]
        assert not found.takes(grammar, of_call.format("sun", of_value.format("city", "x") * 2))


def test_random_calls_under_a_grammar_are_read_and_fit(family: tuple[str, Family]) -> None:
    """In pieces of a letter, too."""
    name, found = family
    thought, liked = ("may come", "</>a1\n") if name in tagged.CALLS else ("none", '</>|"}a1')
    for text, tools, values in drawn_calls(found, thought, liked):
        reader = AnswerReader(found.format, prompt_end="", tools=tools)
        streamed = [part.call for letter in text for part in reader.feed(letter)]
        streamed += [part.call for part in reader.end()]
        assert [json.loads(one.arguments) for one in streamed if one] == [values]


def test_the_other_answer_may_have_any_grammar(family: tuple[str, Family]) -> None:
    name, found = family
    grammar = calls_or_answer(found.format, [SUN], Grammar(form="grammar", text='root ::= "yes"'), "may come")
    assert all(found.takes(grammar, text) for text in (said(name, "yes"), written(name, city="Rome")))
    assert not found.takes(grammar, said(name, "no"))


def test_a_name_that_the_reader_would_not_find_is_refused(family: tuple[str, Family]) -> None:
    name, found = family
    odd: Any = {"type": "function", "function": {"name": "a[b<c\nd{"}}
    with pytest.raises(EdgespecError, match=r"its calls have no such names|is no name between tags"):
        forced_calls(found.format, [odd], "none")
    assert found.takes(forced_calls(found.format, [tool({})], "none"), written(name))


GEMMA = Family(TEMPLATES["gemma 4"], marks=())
NODE = {"type": "object", "properties": {"l": {"$ref": "#/$defs/T"}, "v": {"type": "integer", "maximum": 5}},
        "required": ["v"], "additionalProperties": False}  # fmt: skip
TREE = {"$defs": {"T": NODE}, "$ref": "#/$defs/T"}
LISTS = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
}
OTHERS = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (TREE, [{"v": 1}, {"l": {"l": {"v": 2}, "v": 1}, "v": 5}], [{}, {"l": {}, "v": 1}, {"v": 6}, "x"]),
        (LISTS, [{}, {"a": [True]}, {"a": [True, False]}], [{"a": []}, {"a": [True] * 3}, {"a": [1]}, {"b": "x"}]),
        ({**LISTS, "additionalProperties": True}, [{"b": "x"}], [{"a": []}]),
        (OTHERS, [{"a": "x"}, {"a": {"b": []}, "z": 1}], [{"z": 1}, {"a": 1, "z": "1"}]),
        ({"enum": [{"a": 1}]}, [], []),
        ({"properties": {"a": {"type": ["number", "null"]}, "b": {"enum": [1, "x", True], "type": "string"}}},
         [{"a": 1.5}, {"a": None, "b": "x"}], [{"a": "1"}, {"b": 1}]),
    ],
)  # fmt: skip
def test_keys_without_quotes_are_held_to_schemas(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    grammar = forced_calls(GEMMA.format, [tool(schema)], "none")
    for values in right:
        text = ONE["gemma 4"][0].format("sun", bare(values))
        assert GEMMA.takes(grammar, text), text
        assert calls_of(GEMMA, [tool(schema)], text) == [("sun", values)]
    for values in wrong:
        assert not GEMMA.takes(grammar, ONE["gemma 4"][0].format("sun", bare(values))), values


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, '"pattern"'),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"enum": ["a"]}]}}}, '"allOf"'),
        ({"properties": {"a": {"not": {}}}}, '"not"'),
        ({"properties": {"a,b": {}}}, '"a,b" is no key'),
        ({"properties": {"a": {"$ref": "#/nothing"}}}, "names nothing"),
        ({"properties": {"a": False}}, "nothing fits"),
        ({"properties": {"a": {"enum": [[1]]}}}, '"enum"'),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "allows no value"),
        ({"properties": 5}, "a tool's schema cannot be followed"),
        ({"type": "string"}, "no type that fits"),
    ],
)
def test_what_such_calls_cannot_hold_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(EdgespecError, match=named):
        strict_calls(GEMMA.format, [tool(schema, strict=True)], "none")
    calls_or_answer(GEMMA.format, [tool(schema)], ANSWER, "none")  # any arguments
