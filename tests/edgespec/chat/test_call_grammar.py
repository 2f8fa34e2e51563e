"""Calls that a grammar lets through fit their tools, whether the marks around them are tokens or text."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from edgespec.chat.answer import AnswerReader, answer_format_of
from edgespec.chat.call_grammar import calls_or_answer, forced_calls, strict_calls
from edgespec.chat.tools import Toolset
from edgespec.errors import EdgespecError
from edgespec.pair.find import find_pair
from edgespec.pair.pair import open_pair
from edgespec.sampling.grammar import Grammar, json_schema_grammar
from edgespec.sampling.matcher import token_grammar

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
SUN: Any = {"type": "function", "function": {"name": "sun", "parameters": CITY, "strict": True}}
ANY: Any = {"type": "function", "function": {"name": "any", "parameters": CITY}}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]")
TEMPLATES = {"hermes": "<tool_call> <think>", "mistral": "[TOOL_CALLS]", "llama 3": '<|start_header_id|> "parameters"'}
RIGHT = {
    "hermes": '<tool_call>\n{"name": "sun", "arguments": {"city": "Rome"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "sun", "arguments": {"city": "Rome"}}]',
    "llama 3": '{"name": "sun", "parameters": {"city": "Rome"}}',
}
FAMILIES = [(family, has_tokens) for family in TEMPLATES for has_tokens in (True, False)]


class Family:
    """A family's form over the built-in pair's tokenizer, whose marks are tokens of it or text."""

    def __init__(self, template: str, *, marks: Sequence[str], are_special: bool = False) -> None:
        self.tokenizer = open_pair(*find_pair(None, None)).tokenizer
        self.tokenizer.add_tokens([AddedToken(mark, special=are_special) for mark in marks])
        self.tokenizer.chat_template = template
        answer_format = answer_format_of(self.tokenizer)
        assert answer_format is not None
        self.format, self.vocab, self.stop = answer_format, len(self.tokenizer), 0

    def matcher(self, grammar: Grammar) -> Any:
        return token_grammar(grammar, self.tokenizer, vocab=self.vocab, stop_tokens=frozenset({self.stop})).matcher()

    def takes(self, grammar: Grammar, text: str, *, ends: bool = True) -> bool:
        """Return whether every token of a text is allowed where it stands, and the text may end there."""
        ids, matcher = self.tokenizer.encode(text, add_special_tokens=False), self.matcher(grammar)
        for number, token in enumerate(ids):
            if not matcher.allowed(ids[:number])[token]:
                return False
        return not ends or bool(matcher.allowed(ids)[self.stop])

    def parts(self, text: str, *, prompt_end: str = "") -> list[Any]:
        reader = AnswerReader(self.format, prompt_end=prompt_end, tools=[SUN, ANY])
        return [*reader.feed(text), *reader.end()]


def family_of(name: str, *, has_tokens: bool) -> Family:
    return Family(TEMPLATES[name], marks=MARKS if has_tokens else ())


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda found: f"{found[0]}, {'tokens' if found[1] else 'text'}")
def family(request: pytest.FixtureRequest) -> tuple[str, Family]:
    name, has_tokens = request.param
    return name, family_of(name, has_tokens=has_tokens)


def test_a_required_call_may_be_written_as_the_model_writes_it(family: tuple[str, Family]) -> None:
    name, found = family
    grammar = forced_calls(found.format, [SUN], "may come")
    assert found.takes(grammar, RIGHT[name])
    assert not found.takes(grammar, RIGHT[name].replace("Rome", "Oslo"))
    assert not found.takes(grammar, "Hello")
    assert not found.takes(grammar, RIGHT[name].replace("sun", "any"))


def test_a_required_call_has_the_arguments_that_its_schema_lists_and_no_others(family: tuple[str, Family]) -> None:
    name, found = family
    listed = {key: value for key, value in CITY.items() if key != "additionalProperties"}
    grammar = forced_calls(found.format, [{"function": {"name": "sun", "parameters": listed}}], "may come")
    assert found.takes(grammar, RIGHT[name])
    assert not found.takes(grammar, RIGHT[name].replace('"Rome"', '"Rome", "day": 1'))


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_required_call_may_come_after_the_thought_that_the_prompt_began(has_tokens: bool) -> None:
    found = family_of("hermes", has_tokens=has_tokens)
    grammar = forced_calls(found.format, [SUN], "open")
    assert found.takes(grammar, f"I call <tool_call> now.\n</think>\n\n{RIGHT['hermes']}")
    assert not found.takes(grammar, "I think on.")
    assert not found.takes(grammar, "Hm.</think>Hello", ends=False)


def test_words_are_free_and_calls_are_not(family: tuple[str, Family]) -> None:
    name, found = family
    grammar = strict_calls(found.format, [SUN, ANY], "may come")
    call = RIGHT[name]
    for text in ("", "Hello", "Let me see: <b>1 < 2</b> [TOOL] {x}\n", call):
        assert found.takes(grammar, text), text
    before = "" if name == "llama 3" else "Let me see.\n"
    assert found.takes(grammar, before + call)
    for wrong in (call.replace("Rome", "Oslo"), call.replace("sun", "snow"), call.replace('{"city": "Rome"}', "{}")):
        assert not found.takes(grammar, before + wrong, ends=False), wrong
    # A tool that is not strict may be called with whatever it likes
    assert found.takes(grammar, before + call.replace("sun", "any").replace("Rome", "Oslo"))
    cut = call[: call.index("Rome")]
    assert found.takes(grammar, cut, ends=False)
    assert not found.takes(grammar, cut)


@pytest.mark.parametrize("has_tokens", [True, False])
def test_calls_and_thoughts_follow_each_other(has_tokens: bool) -> None:
    found, call = family_of("hermes", has_tokens=has_tokens), RIGHT["hermes"]
    grammar = strict_calls(found.format, [SUN], "may come")
    wrong = call.replace("Rome", "Oslo")
    assert found.takes(grammar, f"I look.\n{call}\n{call} Done.")
    assert not found.takes(grammar, f"{call}{wrong}", ends=False)
    assert found.takes(grammar, f"<think>{wrong}</think>{call}")  # what is thought is no call
    assert found.takes(grammar, f"<think>{wrong}")
    assert not found.takes(grammar, f"<think>Hm.</think>{wrong}", ends=False)
    thinking = strict_calls(found.format, [SUN], "open")
    assert found.takes(thinking, f"{wrong}</think>{call}")
    assert found.takes(thinking, wrong)
    assert not found.takes(thinking, f"</think>{wrong}", ends=False)


@pytest.mark.parametrize("is_thinking", [False, True])
def test_whatever_the_grammar_lets_through_has_calls_that_fit(family: tuple[str, Family], is_thinking: bool) -> None:
    """Pieces of right and wrong calls are written at random, as far as they are allowed: all that is read fits."""
    name, found = family
    if is_thinking and name != "hermes":
        return
    grammar, draw = strict_calls(found.format, [SUN], "open" if is_thinking else "may come"), random.Random(5)
    begin = RIGHT[name][: RIGHT[name].index("sun")]
    middle = RIGHT[name][RIGHT[name].index("sun") + 3 : RIGHT[name].index("Rome")]
    end = RIGHT[name][RIGHT[name].index("Rome") + 4 :]
    pieces = [begin, begin, "sun", "snow", middle, "Rome", "Oslo", end, "So, {"]
    pieces += ["</think>", "<think>"] if name == "hermes" else []
    num_calls = 0
    for number in range(16):
        matcher, ids = found.matcher(grammar), list[int]()
        for place in range(48):
            first = place == 0 and number % 2  # a family may have calls nowhere else
            piece = found.tokenizer.encode(begin if first else draw.choice(pieces), add_special_tokens=False)
            if all(matcher.allowed(piece[:index])[token] for index, token in enumerate(piece)):
                matcher.add(piece)
                ids += piece
        for part in found.parts(found.tokenizer.decode(ids), prompt_end="<think>" if is_thinking else ""):
            if part.call is not None:
                num_calls += 1
                assert part.call.name == "sun"
                assert json.loads(part.call.arguments)["city"] in {"Paris", "Rome"}
    assert num_calls > 0


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_mark_that_is_spelled_in_letters_opens_no_call_either(name: str) -> None:
    """The reader tells a call by its text, whatever tokens it is of."""
    found = family_of(name, has_tokens=True)
    grammar = strict_calls(found.format, [SUN], "may come")
    mark = found.format.call["mark"]
    spelled = [token for letter in mark for token in found.tokenizer.encode(letter, add_special_tokens=False)]
    assert found.tokenizer.decode(spelled) == mark
    matcher = found.matcher(grammar)
    allowed = [bool(matcher.allowed(spelled[:number])[token]) for number, token in enumerate(spelled)]
    assert allowed == [True] * (len(spelled) - 1) + [False]


def test_words_do_not_begin_as_a_call_that_is_none() -> None:
    found = family_of("llama 3", has_tokens=False)
    grammar = strict_calls(found.format, [SUN], "may come")
    for wrong in ('<|python_tag|>{"name": "snow"}', ' \n <|python_tag|>{"', '{"name": "snow"}'):
        assert not found.takes(grammar, wrong, ends=False), wrong
    assert found.takes(grammar, 'I say <|python_tag|>{"name": "snow"}')  # which is no call there


ANSWER = json_schema_grammar({"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"],
                              "additionalProperties": False})  # fmt: skip


def test_an_answer_calls_or_fits_a_form_of_its_own(family: tuple[str, Family]) -> None:
    name, found = family
    grammar = calls_or_answer(found.format, [SUN, ANY], ANSWER, "may come")
    call = RIGHT[name]
    several = {"hermes": f"{call}\n{call}", "mistral": call.replace("}}]", "}}, " + call[14:])}.get(name, call)
    for text in (call, call.replace("sun", "any").replace("Rome", "Oslo"), several, '{"size": 1}', '\n{ "size": 2}'):
        assert found.takes(grammar, text), text
    for wrong in ("", "Hello", '{"size": 3}', call.replace("Rome", "Oslo"), call.replace("sun", "snow")):
        assert not found.takes(grammar, wrong), wrong
    for wrong in (call + '{"size": 1}', '{"size": 1}' + call, "So: " + call):
        assert not found.takes(grammar, wrong), wrong
    for blank in ("\u2028", "\u2003", "\xa0", "\x0b"):  # which JSON parsers refuse
        assert not found.takes(grammar, blank + '{"size": 1}'), repr(blank)
    letters = Grammar(form="grammar", text='root ::= "yes" | "no"')
    of_letters = calls_or_answer(found.format, [SUN], letters, "may come")
    assert all(found.takes(of_letters, text) for text in ("yes", "no", call))
    assert not any(found.takes(of_letters, text) for text in ("yesno", "{}"))


def drawn_text(found: Family, grammar: Grammar, draw: random.Random, liked: str, *, most: int = 90) -> str | None:
    """Return a text of random tokens that a grammar allows, of these letters more often; None where it did not end."""
    matcher, ids = found.matcher(grammar), list[int]()
    letters = {token for letter in liked for token in found.tokenizer.encode(letter, add_special_tokens=False)}
    for _ in range(most):
        allowed = matcher.allowed([]).nonzero().flatten().tolist()
        if found.stop in allowed:
            return str(found.tokenizer.decode(ids))
        ids.append(draw.choice([token for token in allowed if token in letters] or allowed))
        matcher.add(ids[-1:])
    return None


ODD = [  # what a model may write where a grammar has it call
    ({"type": "object"}, '{"a": 1, "a": 2}', {"a": 2}),
    ({"type": "object"}, '{"a": {"b": "x", "b": "y"}}', {"a": {"b": "y"}}),
    ({"type": "object"}, '{"a": -1e999}', {"a": -1.7976931348623157e308}),
    ({"type": "object"}, '{"a": %s}' % ("7" * 5000), {"a": 1.7976931348623157e308}),
    ({"properties": {"a": {"type": "string"}}}, '{"a": "x"}', {"a": "x"}),  # its type is left out
]  # fmt: skip


@pytest.mark.parametrize(("schema", "written", "meant"), ODD, ids=["twice", "deep", "infinite", "digits", "no type"])
def test_what_a_grammar_has_called_is_a_call(
    family: tuple[str, Family], schema: dict[str, Any], written: str, meant: Any
) -> None:
    name, found = family
    tool: Any = {"type": "function", "function": {"name": "sun", "parameters": schema}}
    text = RIGHT[name].replace('{"city": "Rome"}', written)
    if len(text) < 200:
        assert found.takes(forced_calls(found.format, [tool], "may come"), text)
    whole = found.parts(text)
    (call,) = [part.call for part in whole if part.call is not None]
    assert json.loads(call.arguments) == meant
    # The value that another one took the place of is said
    assert "".join(part.text for part in whole) == {ODD[0][1]: '{"a": 1}', ODD[1][1]: '{"b": "x"}'}.get(written, "")


def test_random_answers_under_a_required_call_are_calls(family: tuple[str, Family]) -> None:
    """Keys and values are drawn of few letters, so that keys come again."""
    _, found = family
    tool: Any = {"type": "function", "function": {"name": "sun", "parameters": {}}}
    grammar, draw, ended = forced_calls(found.format, [tool], "may come"), random.Random(7), 0
    for _ in range(40):
        text = drawn_text(found, grammar, draw, 'a":,}')
        if text is None:
            continue
        ended += 1
        whole, reader = found.parts(text), AnswerReader(found.format, prompt_end="", tools=[tool])
        streamed = [part for letter in text for part in reader.feed(letter)] + reader.end()
        assert [part.call for part in whole if part.call] == [part.call for part in streamed if part.call]
        assert sum(part.call is not None for part in whole) == 1, repr(text)
    assert ended > 10


def test_references_of_a_tools_schema_begin_at_itself(family: tuple[str, Family]) -> None:
    """Of several tools with names of their own for the same path; `definitions` is the older word for `$defs`."""
    name, found = family
    city, day = {"$defs": {"A": CITY["properties"]["city"]}}, {"definitions": {"A": {"type": "integer"}}}
    reference = {"properties": {"city": {"$ref": "#/$defs/A"}}, "required": ["city"], "additionalProperties": False}
    sun = {**SUN["function"], "parameters": {"type": "object", **city, **reference}}
    moon = {"name": "my moon", "parameters": {"$ref": "#/definitions/B", "definitions": {
        "A": day["definitions"]["A"], "B": {"properties": {"city": {"$ref": "#/definitions/A"}}}}}}  # fmt: skip
    tools: list[Any] = [{"type": "function", "function": {**tool, "strict": True}} for tool in (sun, moon)]
    right, wrong = RIGHT[name], RIGHT[name].replace('"Rome"', "7")
    grammars = [make(found.format, tools, "may come") for make in (forced_calls, strict_calls)]
    for grammar in (*grammars, calls_or_answer(found.format, tools, ANSWER, "may come")):
        assert found.takes(grammar, right)
        assert not found.takes(grammar, wrong, ends=False)
        assert found.takes(grammar, wrong.replace("sun", "my moon"))
        assert not found.takes(grammar, right.replace("sun", "my moon"), ends=False)


@pytest.mark.parametrize("has_tokens", [True, False])
def test_an_answer_of_a_form_comes_after_what_is_thought(has_tokens: bool) -> None:
    found, call = family_of("hermes", has_tokens=has_tokens), RIGHT["hermes"]
    for is_thinking, begun in ((False, "<think>"), (True, "")):
        grammar = calls_or_answer(found.format, [SUN], ANSWER, "open" if is_thinking else "may come")
        for end in (call, '{"size": 1}'):
            assert found.takes(grammar, f"{begun}Hm, {{}} <tool_call>\n</think>\n\n{end}")
        assert not found.takes(grammar, f"{begun}Hm.")
        assert not found.takes(grammar, f"{begun}Hm.</think>Hello", ends=False)


def test_families_whose_calls_no_grammar_writes_are_refused() -> None:
    found = family_of("hermes", has_tokens=False)
    found.tokenizer.chat_template = "<think>"  # a family that is known for its thoughts alone
    for make, words in ((forced_calls, "a call of a tool"), (strict_calls, "'strict' cannot be enforced")):
        with pytest.raises(EdgespecError, match=words):
            make(answer_format_of(found.tokenizer), [SUN], "may come")
    with pytest.raises(EdgespecError, match="that tools may be called instead of cannot be enforced"):
        calls_or_answer(answer_format_of(found.tokenizer), [ANY], ANSWER, "may come")


def test_tools_beside_a_form_are_refused_where_nobody_knows_how_answers_are_written() -> None:
    found = family_of("hermes", has_tokens=False)
    ids = found.tokenizer.encode("a", add_special_tokens=False)
    with pytest.raises(EdgespecError, match="that tools may be called instead of cannot be enforced"):
        Toolset(seen=[ANY]).grammar(found.tokenizer, None, ids, answer=ANSWER)
    assert Toolset().grammar(found.tokenizer, None, ids, answer=ANSWER) is ANSWER
