"""Each keyword of a schema is followed, says nothing of what fits, or is refused by name: none is left in silence."""

import json
from typing import Any

import pytest

from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import ANNOTATIONS, FOLLOWED, json_schema_grammar
from tests.edgespec.sampling.test_matcher import ids, over_tokens

INTEGER = {"type": "integer"}
# keyword -> schemas with a text that fits and one that does not
KEPT: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "type": [(INTEGER, "1", '"a"'), ({"type": ["integer", "null"]}, "null", '"a"')],
    "enum": [({"enum": [1, "a"]}, '"a"', '"b"')],
    "const": [({"const": 1}, "1", "2")],
    "nullable": [
        ({**INTEGER, "nullable": True}, "null", '"a"'),
        ({**INTEGER, "nullable": True}, "1", '"a"'),
        ({**INTEGER, "nullable": False}, "1", "null"),
        ({"type": ["integer", "null"], "nullable": True}, "null", '"a"'),
        ({"enum": ["a"], "nullable": True}, "null", '"b"'),
        ({"type": "string", "enum": ["a"], "nullable": True}, '"a"', "1"),
        ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": INTEGER}}, "null", '"a"'),
        ({"allOf": [INTEGER], "nullable": True}, "null", '"a"'),
        ({"type": "object", "properties": {"a": INTEGER}, "nullable": True}, "null", '{"b": 1}'),
        ({"type": "object", "properties": {"nullable": INTEGER}}, '{"nullable": 1}', '{"nullable": null}'),
        ({"type": "array", "items": {**INTEGER, "nullable": True}}, "[1, null]", '["a"]'),
    ],
    "$ref": [({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, "1", '"a"')],
    "$defs": [({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, "1", '"a"')],
    "definitions": [({"$ref": "#/definitions/a", "definitions": {"a": INTEGER}}, "1", '"a"')],
    "components": [({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {**INTEGER, "nullable": True}}}},
                    "null", '"a"')],
    "$anchor": [({"$ref": "#a", "$defs": {"a": {"$anchor": "a", **INTEGER}}}, "1", '"a"')],
    "$id": [({"$id": "http://x/y", "$ref": "http://x/y#/$defs/a", "$defs": {"a": INTEGER}}, "1", '"a"')],
    "id": [({"id": "http://x/y", **INTEGER}, "1", '"a"')],
    "$schema": [({"$schema": "http://json-schema.org/draft-07/schema#", **INTEGER}, "1", '"a"')],
    "allOf": [({"allOf": [INTEGER, {"minimum": 5}]}, "5", "4")],
    "anyOf": [({"anyOf": [INTEGER, {"type": "null"}]}, "null", '"a"')],
    "oneOf": [({"oneOf": [INTEGER, {"type": "null"}]}, "null", '"a"')],
    "properties": [({"type": "object", "properties": {"a": INTEGER}}, '{"a": 1}', '{"a": "a"}')],
    "patternProperties": [({"type": "object", "patternProperties": {"^a": INTEGER}}, '{"ab": 1}', '{"ab": "a"}')],
    "additionalProperties": [({"type": "object", "additionalProperties": INTEGER}, '{"a": 1}', '{"a": "a"}')],
    "required": [({"type": "object", "required": ["a"], "properties": {"a": INTEGER}}, '{"a": 1}', "{}")],
    "minProperties": [({"type": "object", "minProperties": 1}, '{"a": 1}', "{}")],
    "maxProperties": [({"type": "object", "maxProperties": 0}, "{}", '{"a": 1}')],
    "items": [({"type": "array", "items": INTEGER}, "[1]", '["a"]'), ({"items": [INTEGER]}, "[1]", '["a"]')],
    "prefixItems": [({"type": "array", "prefixItems": [INTEGER]}, '[1, "a"]', '["a"]')],
    "additionalItems": [({"items": [INTEGER], "additionalItems": False}, "[1]", "[1, 1]")],
    "minItems": [({"type": "array", "minItems": 1}, "[1]", "[]")],
    "maxItems": [({"type": "array", "maxItems": 1}, "[1]", "[1, 1]")],
    "minLength": [({"type": "string", "minLength": 2}, '"ab"', '"a"')],
    "maxLength": [({"type": "string", "maxLength": 1}, '"a"', '"ab"')],
    "pattern": [({"type": "string", "pattern": "^a$"}, '"a"', '"b"')],
    "format": [
        ({"type": "string", "format": "date"}, '"2020-01-01"', '"a"'),
        ({**INTEGER, "format": "int32"}, "2147483647", "2147483648"),
        ({**INTEGER, "format": "int32", "minimum": 0}, "0", "-1"),
        ({"type": ["integer", "null"], "format": "int32", "maximum": 2**40}, "-2147483648", "2147483648"),
        ({"type": "number", "format": "double"}, "1.5", '"a"'),
    ],
    "minimum": [({**INTEGER, "minimum": 3}, "3", "2")],
    "maximum": [({**INTEGER, "maximum": 3}, "3", "4")],
    "exclusiveMinimum": [({**INTEGER, "exclusiveMinimum": 3}, "4", "3"),
                         ({**INTEGER, "minimum": 3, "exclusiveMinimum": True}, "4", "3")],
    "exclusiveMaximum": [({**INTEGER, "exclusiveMaximum": 3}, "2", "3"),
                         ({**INTEGER, "maximum": 3, "exclusiveMaximum": True}, "2", "3")],
    "multipleOf": [({**INTEGER, "multipleOf": 3}, "6", "7")],
    "x-guidance": [({"type": "array", "x-guidance": {"whitespace_flexible": False}}, "[1,2]", "[1, 2]")],
}  # fmt: skip
NOT_FOLLOWED: dict[str, dict[str, Any]] = {
    "$dynamicRef": {"$dynamicRef": "#a"}, "$dynamicAnchor": {"$dynamicAnchor": "a"},
    "$recursiveRef": {"$recursiveRef": "#"}, "$recursiveAnchor": {"$recursiveAnchor": True},
    "not": {"not": {"const": 3}}, "if": {"if": INTEGER}, "then": {"then": INTEGER}, "else": {"else": INTEGER},
    "dependentSchemas": {"dependentSchemas": {"a": {}}}, "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependencies": {"dependencies": {"a": ["b"]}}, "propertyNames": {"propertyNames": {"pattern": "^a$"}},
    "unevaluatedProperties": {"unevaluatedProperties": False}, "unevaluatedItems": {"unevaluatedItems": False},
    "contains": {"contains": INTEGER}, "minContains": {"minContains": 2}, "maxContains": {"maxContains": 2},
    "uniqueItems": {"uniqueItems": True},
    # of the third draft, misspelled, and of nobody
    "divisibleBy": {"divisibleBy": 3}, "disallow": {"disallow": "string"}, "extends": {"extends": INTEGER},
    "requried": {"requried": ["a"]}, "minimun": {"minimun": 3}, "frobnicate": {"frobnicate": True},
}  # fmt: skip
# All of JSON Schema 2020-12's, by vocabulary, and of OpenAPI 3.0's and 3.1's
PUBLISHED = {
    "$schema", "$id", "$anchor", "$ref", "$dynamicRef", "$dynamicAnchor", "$vocabulary", "$comment", "$defs",
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "prefixItems", "items", "contains",
    "properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties", "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum",
    "exclusiveMinimum", "maxLength", "minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxContains",
    "minContains", "maxProperties", "minProperties", "required", "dependentRequired", "title", "description",
    "default", "deprecated", "readOnly", "writeOnly", "examples", "format", "contentEncoding", "contentMediaType",
    "contentSchema", "nullable", "discriminator", "xml", "externalDocs", "example", "definitions", "dependencies",
    "additionalItems", "id", "$recursiveRef", "$recursiveAnchor",
}  # fmt: skip


def fits(schema: dict[str, Any], text: str) -> bool:
    allowed = over_tokens(json_schema_grammar(schema)).matcher().allowed(ids(text))
    return allowed is not None and bool(allowed[ids("<|endoftext|>")])


def test_every_published_keyword_is_in_one_of_the_lists() -> None:
    assert not FOLLOWED ^ KEPT.keys()
    assert PUBLISHED.issubset([*FOLLOWED, *ANNOTATIONS, *NOT_FOLLOWED])
    assert FOLLOWED.isdisjoint(ANNOTATIONS)
    assert NOT_FOLLOWED.keys().isdisjoint(FOLLOWED | ANNOTATIONS)


@pytest.mark.parametrize("names", [[*KEPT][start::12] for start in range(12)], ids=" ".join)
def test_a_keyword_that_is_followed_lets_through_what_fits_alone(names: list[str]) -> None:
    for name, (schema, right, wrong) in [(one, case) for one in names for case in KEPT[one]]:
        assert name in json.dumps(schema)
        assert fits(schema, right), schema
        assert not fits(schema, wrong), schema


@pytest.mark.parametrize("name", [*sorted(ANNOTATIONS), "x-order"])
def test_an_annotation_changes_nothing(name: str) -> None:
    for value in ("a", {"propertyName": "a"}):
        schema = {"type": "object", "properties": {"a": {**INTEGER, name: value}}, name: value}
        assert fits(schema, '{"a": 1}')
        assert not fits(schema, '{"a": "a"}')


@pytest.mark.parametrize("name", NOT_FOLLOWED)
@pytest.mark.parametrize("kind", ["object", "array", "integer"])
def test_a_keyword_that_is_not_followed_is_named_wherever_it_stands(name: str, kind: str) -> None:
    part = {"type": kind, **NOT_FOLLOWED[name]}
    places: list[dict[str, Any]] = [
        part, {"properties": {"a": part}}, {"items": part}, {"anyOf": [INTEGER, part]}, {"prefixItems": [part]},
        {"$defs": {"a": part}, "$ref": "#/$defs/a"}, {"additionalProperties": part}, {"patternProperties": {"a": part}},
        {"allOf": [{"properties": {"a": {"items": part}}}]},
    ]  # fmt: skip
    for schema in places:
        with pytest.raises(EdgespecError, match=f'cannot be followed: "{name.replace("$", "[$]")}" is no keyword'):
            over_tokens(json_schema_grammar(schema))


@pytest.mark.parametrize("part", [{"nullable": "true"}, {"type": "object", "properties": {"a": {"required": True}}}])
def test_a_keyword_of_a_value_that_says_nothing_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(EdgespecError, match=r'cannot be followed: "(nullable|required)" is'):
        over_tokens(json_schema_grammar(part))


def test_names_of_properties_and_values_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"frobnicate": {"enum": [{"not": 1}], "default": {"if": 2}}}}
    assert fits(schema, '{"frobnicate": {"not": 1}}')


def test_a_schema_that_asks_for_lenience_itself_has_what_cannot_be_followed_left_out() -> None:
    assert fits({"type": "array", "uniqueItems": True, "frobnicate": 1, "x-guidance": {"lenient": True}}, "[1, 1]")


def test_a_schema_that_may_be_null_keeps_its_references_and_its_closed_objects() -> None:
    part = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    schema = {"allOf": [part], "nullable": True, "$defs": {"a": {**INTEGER, "nullable": True}}}
    for text, is_right in (('{"a": 1}', True), ('{"a": null}', True), ("null", True), ('{"a": 1, "b": 2}', False)):
        assert fits(schema, text) == is_right, text
