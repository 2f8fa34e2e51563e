"""A grammar followed with llguidance: behind a path as behind the same text, and back again."""

import builtins
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import Grammar, json_schema_grammar, response_format_grammar
from edgespec.sampling.matcher import GrammarMatcher, TokenGrammar, token_grammar
from tests.support.families import make_tokenizer

TOKENIZER = make_tokenizer()  # bytes, and an end
END, PADDED = 256, 264  # the model's table has more rows than there are tokens
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}},
    "required": ["ab"],
    "additionalProperties": False,
}
GBNF = 'root ::= ("a" | "bc") [0-9]? "."\n'


def over_tokens(grammar: Grammar, **options: Any) -> TokenGrammar:
    pytest.importorskip("llguidance")
    options = {"vocab": PADDED, "stop_tokens": frozenset({END}), **options}
    return token_grammar(grammar, TOKENIZER, **options)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def spelled(allowed: Tensor | None) -> set[str]:
    assert allowed.shape == (PADDED,)
    return {TOKENIZER.decode([token]) for token in allowed.nonzero().flatten().tolist()}


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("", "", {"a", "b"}),
        ("", "b", {"c"}),
        ("a", "", {*"0123456789."}),
        ("b", "c7", {"."}),
        ("", "a7.", {"<|endoftext|>"}),
        ("a.", "", {"<|endoftext|>"}),
    ],
)
def test_what_may_come_is_what_the_grammar_has_behind_text_and_path(text: str, path: str, expected: set[str]) -> None:
    matcher = over_tokens(Grammar(form="grammar", text=GBNF)).matcher()
    matcher.add(ids(text))
    before = spelled(matcher.allowed(()))
    assert spelled(matcher.allowed(ids(path))) == expected
    assert spelled(matcher.allowed(())) == before, "the matcher is at the text again"


def test_paths_of_a_tree_in_any_order_have_what_fresh_texts_have() -> None:
    """Every node of every branch, asked back and forth, beside a matcher that only went there."""
    grammar = over_tokens(json_schema_grammar(SCHEMA))
    matcher = grammar.matcher()
    committed = ids('{"a')
    matcher.add(committed)
    whole = ['b": 12}', 'b":1', 'b" : -3 }']
    paths = [ids(text)[:length] for text in whole for length in range(len(text) + 1)]
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(len(paths), (60,), generator=generator).tolist():
        fresh = GrammarMatcher(grammar)
        fresh.add([*committed, *paths[place]])
        found, expected = matcher.allowed(paths[place]), fresh.allowed(())
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def takes(grammar: TokenGrammar, text: str) -> bool:
    """Whether a text may be written to its end."""
    matcher, tokens = grammar.matcher(), ids(text)
    for count, token in enumerate([*tokens, END]):
        allowed = matcher.allowed(tokens[:count])
        if allowed is None or not allowed[token]:
            return False
    return True


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"ab":1}', True),
        ('{ "ab" : 1 }', True),
        ('{\n\n                    "ab": 1\n}', True),
        ('{\n\n\n"ab": 1}', False),
        ('{\n                     "ab": 1}', False),
        ('{  "ab": 1}', False),
        ('{"ab": 1\n\n\n}', False),
    ],
)
def test_white_space_in_json_comes_to_an_end(text: str, fits: bool) -> None:
    whole = response_format_grammar({"type": "json_object"})
    assert whole is not None
    for grammar in (json_schema_grammar(SCHEMA), json_schema_grammar(json.dumps(SCHEMA)), whole):
        assert takes(over_tokens(grammar), text) == fits


def test_white_space_that_a_schema_or_a_grammar_asks_for_itself_stays() -> None:
    for options, text in (({"whitespace_flexible": False}, '{"ab":1}'), ({"whitespace_pattern": "_?"}, '{_"ab":1_}')):
        grammar = over_tokens(json_schema_grammar({**SCHEMA, "x-guidance": options}))
        assert takes(grammar, text)
        assert not takes(grammar, '{ "ab": 1}')
    commas = over_tokens(json_schema_grammar({"type": "array", "x-guidance": {"item_separator": ";"}}))
    assert takes(commas, "[1;\n2]")
    assert not takes(commas, "[1;\n\n\n2]")
    assert takes(over_tokens(Grammar(form="grammar", text=f"start: %json {json.dumps(SCHEMA)}\n")), '{\n\n\n"ab": 1}')


def test_behind_the_end_of_a_text_nothing_is_asked() -> None:
    matcher = over_tokens(Grammar(form="grammar", text=GBNF)).matcher()
    assert matcher.allowed([*ids("a."), END]) is None
    assert matcher.allowed([*ids("a."), END, 3, 4]) is None
    assert spelled(matcher.allowed(())) == {"a", "b"}
    matcher.add([*ids("a."), END])


def test_a_path_that_the_grammar_has_in_part_leaves_the_text_as_it_is() -> None:
    """As of a draft that has none of the tokens that may come."""
    matcher = over_tokens(Grammar(form="grammar", text=GBNF)).matcher()
    assert matcher.allowed(ids("bx")) is None
    assert spelled(matcher.allowed(())) == {"a", "b"}


def test_tokens_that_do_not_fit_are_an_error_that_says_so() -> None:
    matcher = over_tokens(Grammar(form="grammar", text=GBNF)).matcher()
    matcher.add(ids("x"))
    with pytest.raises(EdgespecError, match="the grammar cannot be followed: Parser Error") as raised:
        matcher.allowed(())
    assert raised.value.code == "E_GRAMMAR"


def test_lark_as_its_own_library_reads_it_may_have_rules_that_leave_no_node() -> None:
    """As in the grammar of JSON that comes with Lark, and that outlines sends."""
    text = """
        ?start: value
        ?value: array | ESCAPED_STRING | SIGNED_NUMBER -> number
        | "true" -> true
        array : "[" [value ("," value)*] "]"
        %import common.ESCAPED_STRING
        %import common.SIGNED_NUMBER
        %import common.WS
        %ignore WS
    """
    grammars = [text, "\n".join(line.strip() for line in text.splitlines())]
    for matcher in (over_tokens(Grammar(form="grammar", text=each)).matcher() for each in grammars):
        matcher.add(ids('["?a: b", 1, [true'))
        assert {"]", ",", " "} <= spelled(matcher.allowed(()))
        assert "?" not in spelled(matcher.allowed(()))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: over_tokens(json_schema_grammar({"type": "foo"})),
            "JSON schema cannot be followed: Invalid type: foo",
        ),
        (lambda: over_tokens(json_schema_grammar({"if": {}})), '"if" is no keyword that is followed'),
        (lambda: over_tokens(json_schema_grammar({"required": "é" * 80})), "llguidance fails at it"),
        (lambda: json_schema_grammar("{"), "it is not JSON"),
        (lambda: json_schema_grammar("[1]"), "it is no JSON object"),
        (lambda: over_tokens(Grammar(form="grammar", text='start: "a" b')), "unknown name"),
        (lambda: over_tokens(Grammar(form="grammar", text="root ::= (")), "the grammar cannot be followed"),
        (lambda: over_tokens(json_schema_grammar({}), stop_tokens=frozenset()), "must be able to end"),
        (lambda: response_format_grammar({"type": "xml"}), 'response_format has type "xml"'),
        (lambda: response_format_grammar({}), "response_format has type null"),
        (lambda: response_format_grammar({"type": "json_schema"}), "has no schema"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_reason(make: Any, said: str) -> None:
    with pytest.raises(EdgespecError, match=said) as raised:
        make()
    assert raised.value.code == "E_GRAMMAR"
    assert "\n" not in raised.value.what


@pytest.mark.parametrize("text", ['root ::= root "a"', 'root ::= a\na ::= b\nb ::= a "x"', 'start: start "x"'])
def test_a_grammar_that_allows_no_first_token_is_refused_when_it_is_made(text: str) -> None:
    with pytest.raises(EdgespecError, match="grammar cannot be followed: it allows no first token"):
        over_tokens(Grammar(form="grammar", text=text))


def test_a_grammar_of_an_empty_text_allows_its_end() -> None:
    assert spelled(over_tokens(Grammar(form="grammar", text='root ::= ""')).matcher().allowed([])) == {"<|endoftext|>"}


def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return right(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EdgespecError, match="need the library llguidance") as raised:
        token_grammar(json_schema_grammar({}), TOKENIZER, vocab=PADDED, stop_tokens=frozenset({END}))
    assert "edgespec[grammar]" in raised.value.fix


def test_response_formats_are_openais() -> None:
    assert response_format_grammar({"type": "text"}) is None
    assert response_format_grammar({"type": "json_object"}) == Grammar(form="json_schema", text='{"type": "object"}')
    asked = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    found = response_format_grammar(asked)
    assert json.loads(found.text) == SCHEMA


@pytest.mark.parametrize(
    "form",
    [{"json_schema": {"name": "a", "schema": SCHEMA}}, {"schema": SCHEMA}, {"json_schema": None, "schema": SCHEMA}],
)
def test_a_response_format_has_its_schema_as_openai_or_as_llama_cpp_has_it(form: dict[str, Any]) -> None:
    found = response_format_grammar({"type": "json_schema", **form})
    assert found is not None
    grammar = over_tokens(found)
    assert takes(grammar, '{"ab":1}')
    assert not takes(grammar, '{"b":1}')


@pytest.mark.parametrize("form", [{}, {"json_schema": {}}, {"json_schema": "a"}])
def test_a_response_format_without_its_schema_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(EdgespecError, match="has no schema"):
        response_format_grammar({"type": "json_schema", **form})


LISTED = {"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (LISTED, '{"ab":1,"c":2}'),
        ({"type": "array", "items": LISTED}, '[{"ab":1,"c":2}]'),
        ({"type": "object", "properties": {"x": LISTED}}, '{"x":{"ab":1,"c":2}}'),
        ({"$defs": {"a": LISTED}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, '{"ab":1,"c":2}'),
        ({"allOf": [LISTED]}, '{"ab":1,"c":2}'),
        ({"type": "object", "properties": {"properties": LISTED}}, '{"properties":{"ab":1,"c":2}}'),
        ({"type": "object", "properties": {}}, '{"c":2}'),
    ],
)
def test_an_object_has_the_properties_that_its_schema_lists_and_no_others(schema: dict[str, Any], text: str) -> None:
    """A model that may add properties of any name does, some without end."""
    grammar = over_tokens(json_schema_grammar(schema))
    assert not takes(grammar, text)
    assert takes(grammar, text.replace(',"c":2', "").replace('"c":2', ""))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**LISTED, "additionalProperties": True}, '{"ab":1,"c":2}'),
        ({**LISTED, "patternProperties": {"^c": {"type": "integer"}}}, '{"ab":1,"c":2}'),
        ({"type": "object"}, '{"c":2}'),
        ({"type": "object", "properties": {"a": {}}, "required": ["c"]}, '{"c":2}'),
        ({"enum": [{"type": "object", "properties": {}, "c": 1}]}, '{"type":"object","properties":{},"c":1}'),
        ({"allOf": [LISTED, {"type": "object", "properties": {"c": {"type": "integer"}}}]}, '{"ab":1,"c":2}'),
        ({"$defs": {"a": LISTED}, "$ref": "#/$defs/a", "properties": {"c": {"type": "integer"}}}, '{"ab":1,"c":2}'),
        ({**LISTED, "anyOf": [{"properties": {"c": {"type": "integer"}}}]}, '{"ab":1,"c":2}'),
    ],
)
def test_an_object_has_other_properties_where_its_schema_says_so_or_is_made_of_several(
    schema: dict[str, Any], text: str
) -> None:
    assert takes(over_tokens(json_schema_grammar(schema)), text)


def test_objects_of_one_of_several_schemas_are_refused_as_before() -> None:
    """Those that are closed could be told apart, and a text of one could fit the other that is not."""
    one, two = (
        {"type": "object", "properties": {key: {} for key in keys}, "required": [*keys]} for keys in ("a", "ab")
    )
    with pytest.raises(EdgespecError, match="oneOf"):
        over_tokens(json_schema_grammar({"oneOf": [one, two]}))
