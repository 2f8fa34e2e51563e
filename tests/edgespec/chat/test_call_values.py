"""A value that was written as text has the type that the tool's schema has for it, wherever the schema says so."""

from typing import Any

import pytest

from edgespec.chat.call_values import call_values, typed_values

SIZE = {"type": "object", "properties": {"w": {"type": "integer"}}}
DEFS: dict[str, Any] = {
    "Limit": {"type": "integer"}, "Size": SIZE, "Same": {"$ref": "#/$defs/Limit"}, "a/b~c d": {"type": "boolean"},
    "Tree": {"type": ["object", "null"], "properties": {"left": {"$ref": "#/$defs/Tree"}}},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "number"}]}, "Never": {"$ref": "#/$defs/Never"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/Limit"}, "10", 10),
        ({"$ref": "#/$defs/Size"}, '{"w": 3}', {"w": 3}),
        ({"$ref": "#/$defs/Same"}, "10", 10),
        ({"$ref": "#/$defs/Tree"}, '{"left": null}', {"left": None}),
        ({"$ref": "#/$defs/Tree"}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "1.5", 1.5),
        ({"$ref": "#/$defs/Never"}, "1", "1"),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "True", True),
        ({"$ref": "#/$defs/Size/properties/w"}, "3", 3),
        ({"$ref": "#/definitions/Old"}, "[1]", [1]),
        ({"$ref": "https://example.com/schema"}, "1", "1"),
        ({"$ref": "#/$defs/Unknown"}, "1", "1"),
        ({"$ref": "#/$defs/Limit", "description": "how many"}, "10", 10),
        ({"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]}, '{"w": 4}', {"w": 4}),
        ({"oneOf": [{"type": "null"}, {"allOf": [{"$ref": "#/$defs/Limit"}]}]}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Limit"}], "default": 3}, "5", 5),
        ({"enum": [1, 2, 3]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"const": 7}, "7", 7),
        ({"const": None}, "null", None),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"type": "string"}, "8", "8"),
        ({"type": "integer"}, " 3.0 ", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", 1.7976931348623157e308),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "boolean"}, "maybe", "maybe"),
        ({"type": "integer", "not": {"type": "string"}}, "1_000", "1_000"),
        ({}, "1", "1"),
        (True, "1", "1"),
        ({"anyOf": "odd", "enum": 3, "type": 5, "properties": []}, "1", "1"),
    ],
)
def test_a_value_has_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    root = {"type": "object", "properties": {"x": schema}, "$defs": DEFS, "definitions": {"Old": {"type": "array"}}}
    for whole in (root, {**root, "properties": {}, "allOf": [{"properties": {"x": schema}}]},
                  {"$ref": "#/$defs/Root", "$defs": {**DEFS, "Root": root}, "definitions": root["definitions"]},
                  {**root, "properties": {}, "additionalProperties": schema},
                  {**root, "properties": {}, "patternProperties": {"^x$": schema, "(": {}}}):  # fmt: skip
        assert typed_values({"x": text}, whole) == {"x": value}
        assert type(typed_values({"x": text}, whole)["x"]) is type(value)


def test_values_that_are_no_text_and_schemas_that_are_none_stay() -> None:
    for schema in (None, True, [], {"properties": {"x": {"type": "string"}}}):
        assert typed_values({"x": 5, "y": "6"}, schema) == {"x": 5, "y": "6"}
    schema = {"properties": {"x": {"type": "number"}}}
    assert call_values({"name": " f ", "arguments": {"x": "5"}}, {"f": schema}) == ("f", '{"x": 5}', "")
