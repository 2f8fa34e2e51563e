"""Calls whose values stand between tags are held to their tools' schemas as calls in JSON are."""

import json
import random
from typing import Any

import pytest

from edgespec.chat.answer import AnswerReader
from edgespec.chat.answer_frame import Thought
from edgespec.chat.call_grammar import calls_or_answer, forced_calls, strict_calls
from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import json_schema_grammar
from tests.edgespec.chat.test_call_grammar import ANSWER, SUN, Family, drawn_text

DSML = "\uff5cDSML\uff5c"
NO_TEXTS = ("days", "at", "far", "tags", "kind")  # of `SCHEMA`, below
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
         "<minimax:tool_call>", "</minimax:tool_call>", DSML)  # fmt: skip
TEMPLATES = {"qwen": "<tool_call> <function= <think>", "glm": "<tool_call> <arg_key>", "minimax": "<minimax:tool_call>",
             "deepseek 3.2": f"{DSML} function_calls <think>", "deepseek 4": DSML}  # fmt: skip
CALLS = {
    "qwen": ("<tool_call>\n<function={}>\n{}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n"),
    "glm": ("<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "minimax": ('<minimax:tool_call>\n<invoke name="{}">\n{}</invoke>\n</minimax:tool_call>',
                '<parameter name="{}">{}</parameter>\n'),
    **{name: (f'<{DSML}{section}>\n<{DSML}invoke name="{{}}">\n{{}}</{DSML}invoke>\n</{DSML}{section}>',
              f'<{DSML}parameter name="{{}}" string="true">{{}}</{DSML}parameter>\n')
       for name, section in (("deepseek 3.2", "function_calls"), ("deepseek 4", "tool_calls"))},
}  # fmt: skip


def written(family: str, name: str = "sun", /, **values: str) -> str:
    call, value = CALLS[family]
    pairs = ((value.replace('"true"', '"false"') if key in NO_TEXTS else value).format(key, text)
             for key, text in values.items())  # fmt: skip
    return call.format(name, "".join(pairs))


def tool(schema: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": "sun", "parameters": schema, **more}}


def calls_of(found: Family, tools: list[Any], text: str) -> list[Any]:
    reader = AnswerReader(found.format, prompt_end="", tools=tools)
    parts = [*reader.feed(text), *reader.end()]
    return [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call]


@pytest.mark.parametrize("has_tokens", [True, False])
def test_calls_come_after_what_is_thought(has_tokens: bool) -> None:
    found, right = Family(TEMPLATES["qwen"], marks=MARKS if has_tokens else ()), written("qwen", city="Rome")
    thought = "Hm, <tool_call> {}\n</think>\n\n"
    assert found.takes(forced_calls(found.format, [SUN], "open"), thought + right)
    for is_thinking, begun in ((False, "<think>"), (True, "")):
        grammar = calls_or_answer(found.format, [SUN], ANSWER, "open" if is_thinking else "may come")
        assert all(found.takes(grammar, begun + thought + end) for end in (right, '{"size": 1}'))
        assert not found.takes(grammar, f"{begun}Hm.")


SCHEMA = {
    "type": "object",
    "$defs": {"Days": {"type": "integer"}, "At": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Days"}},
                                                  "required": ["x"], "additionalProperties": False}},
    "properties": {
        "city": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}, "unit": {"enum": ["c", "f", None]},
        "at": {"allOf": [{"$ref": "#/$defs/At"}]}, "far": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "tags": {"type": "array", "items": {"enum": ["a"]}},
        "mode": {"anyOf": [{"type": "string", "enum": ["1", "2"]}, {"type": "boolean"}]}, "kind": {"const": 5},
    },
    "required": ["city"], "additionalProperties": False,
}  # fmt: skip


def drawn_calls(found: Family, thought: Thought, liked: str) -> list[tuple[str, list[Any], Any]]:
    """Random texts that end, their tools and arguments: each is one call that fits the schema, as llguidance checks."""
    draw, ended, fits = random.Random(3), [], json_schema_grammar(SCHEMA)
    for is_strict in (True, False):
        for schema in (SCHEMA, {"type": "object", "properties": {"days": {"type": "integer"}}}):
            tools = [tool(schema, strict=is_strict)]
            grammar = forced_calls(found.format, tools, thought)
            for _ in range(12):
                text = drawn_text(found, grammar, draw, liked, most=200)
                if text is None:
                    continue
                ((name, values),) = calls_of(found, tools, text)
                assert name == "sun"
                assert schema is not SCHEMA or found.takes(fits, json.dumps(values)), (text, values)
                ended.append((text, tools, values))
    assert len(ended) > 5
    return ended


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}, "the text 'a' has a pattern"),
        ({"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]}, "one of several forms"),
        ({"type": "object", "properties": {"a<b": {}}}, "'a<b' is no name between tags"),
        ({"type": "object", "properties": 5}, "a tool's schema cannot be followed"),
        ({"type": "object", "properties": {"a": {"enum": 5}}}, "a tool's schema cannot be followed"),
        ({"type": "object", "required": 5}, "a tool's schema cannot be followed"),
    ],
)
def test_what_tags_cannot_hold_is_refused_by_name(schema: Any, named: str) -> None:
    found = Family(TEMPLATES["qwen"], marks=())
    with pytest.raises(EdgespecError, match=named):
        strict_calls(found.format, [tool(schema, strict=True)], "may come")
    calls_or_answer(found.format, [tool(schema)], ANSWER, "may come")  # any arguments


def test_a_required_call_of_a_tool_that_is_not_strict_may_have_such_values() -> None:
    found = Family(TEMPLATES["qwen"], marks=())
    bounded = tool({"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}, "required": ["a"]})
    grammar = forced_calls(found.format, [bounded], "may come")
    assert found.takes(grammar, written("qwen", a="xy"))
    assert not found.takes(grammar, written("qwen", b="any"))
    assert not found.takes(grammar, written("qwen", a="xy", b="any")), "an argument that no schema lists"
    bounded["function"]["parameters"]["additionalProperties"] = True
    assert found.takes(forced_calls(found.format, [bounded], "may come"), written("qwen", a="xy", b="any"))


@pytest.mark.parametrize("are_special", [True, False])
def test_a_value_that_says_whether_it_is_a_text_is_held_to_what_it_says(are_special: bool) -> None:
    """DeepSeek's mark is one token in the middle of each tag, which controls something or not."""
    found = Family(TEMPLATES["deepseek 3.2"], marks=(DSML, "<think>", "</think>"), are_special=are_special)
    call, value = CALLS["deepseek 3.2"]
    properties = {"either": {"type": ["string", "null"]}, "any": {}, "whole": {"type": "integer"}}
    tools = [tool({"type": "object", "properties": properties}, strict=True)]
    grammars = [forced_calls(found.format, tools, "may come"), strict_calls(found.format, tools, "may come"),
                calls_or_answer(found.format, tools, ANSWER, "may come")]  # fmt: skip

    def of(key: str, kind: str, text: str) -> str:
        return call.format("sun", value.replace('"true"', f'"{kind}"').format(key, text))

    right: dict[str, Any] = {
        of("either", "true", "null"): {"either": "null"}, of("either", "false", "null"): {"either": None},
        of("any", "true", "5 </p> <"): {"any": "5 </p> <"}, of("any", "false", '{"a": [1]}'): {"any": {"a": [1]}},
        of("whole", "false", "5"): {"whole": 5},
    }  # fmt: skip
    for text, values in right.items():
        assert all(found.takes(grammar, text) for grammar in grammars), text
        assert calls_of(found, tools, text) == [("sun", values)]
    for text in (
        of("whole", "true", "5"),
        of("whole", "false", "x"),
        of("either", "false", "x"),
        of("other", "true", ""),
    ):
        assert not any(found.takes(grammar, text) for grammar in grammars), text
    strict = grammars[1]
    assert found.takes(strict, f"<think>a < b</think>Now 1 < 2: {next(iter(right))}")
    assert not found.takes(strict, f"Now <{DSML}invoke", ends=False), "a call without its section"


@pytest.mark.parametrize(("kind", "text", "expected"), [
    ("true", "5", "5"), ("false", "5", 5), ("false", "{5", "{5"), ("false", '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
])  # fmt: skip
def test_what_a_value_says_of_itself_is_read_where_it_is_so(kind: str, text: str, expected: Any) -> None:
    call, value = CALLS["deepseek 3.2"]
    written_call = call.format("sun", value.replace('"true"', f'"{kind}"').format("any", text))
    found = Family(TEMPLATES["deepseek 3.2"], marks=())
    assert calls_of(found, [tool({"type": "object"})], written_call) == [("sun", {"any": expected})]
    untyped = written_call.replace(f' string="{kind}"', "")
    schema = {"type": "object", "properties": {"any": {"type": "integer"}}}
    assert calls_of(found, [tool(schema)], untyped) == [("sun", {"any": 5 if text == "5" else text})]


def test_values_may_refer_to_openapis_components_which_may_be_null() -> None:
    one = {"$ref": "#/components/schemas/one"}
    properties = {"a": one, "b": {"type": "array", "items": one}}
    schema = {"type": "object", "components": {"schemas": {"one": {"type": "integer", "nullable": True}}},
              "properties": properties, "required": [*properties]}  # fmt: skip
    found = Family(TEMPLATES["glm"], marks=())
    grammar = forced_calls(found.format, [tool(schema, strict=True)], "may come")
    assert all(found.takes(grammar, written("glm", a=text, b=f"[{text}]")) for text in ("5", "null"))
    assert not found.takes(grammar, written("glm", a="x", b="[]"))
    assert not found.takes(grammar, written("glm", a="5", b='["x"]'))
