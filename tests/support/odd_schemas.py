"""Odd JSON schemas: deep, recursive, contradictory, huge, no schemas at all, and small ones that ask for much."""

import string
from typing import Any


def _nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"], "additionalProperties": False}
    return found


def _field(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False, **more}


_TREE = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
         "required": ["value"], "additionalProperties": False}  # fmt: skip
_PARTS: dict[str, Any] = {
    "any": {}, "true": True, "false": False, "null": {"type": "null"}, "const text": {"const": 'a "b" \\ é'},
    "const object": {"const": {"b": [1, None, 1e300]}}, "const null": {"const": None}, "empty enum": {"enum": []},
    "enum of prefixes": {"enum": ["a", "ab", "abc", "abcd"]}, "enum of numbers": {"enum": [1, 10, 100, 1.5, -0.0]},
    "enum of all kinds": {"enum": [None, True, 0, "", [], {}]}, "enum of a surrogate": {"enum": ["\ud83d"]},
    "enum of emoji": {"enum": ["👩‍👩‍👧", "é", "\u0000"]}, "long enum": {"enum": [f"value {n}" for n in range(2000)]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "pattern that looks ahead": {"type": "string", "pattern": "^(?=a)b"},
    "pattern that refers back": {"type": "string", "pattern": r"^(a|b)\1$"},
    "pattern that is none": {"type": "string", "pattern": "["},
    "pattern of a million": {"type": "string", "pattern": "^a{1000000}$"},
    "pattern of nothing": {"type": "string", "pattern": ""},
    **{f"format {name}": {"type": "string", "format": name} for name in (
        "date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown-format",
        "regex", "iri",
    )},
    "short text": {"type": "string", "minLength": 2, "maxLength": 3},
    "text of no length": {"type": "string", "minLength": 3, "maxLength": 2},
    "long text": {"type": "string", "maxLength": 100000},
    "text of a negative length": {"type": "string", "minLength": -1},
    "number between": {"type": "number", "minimum": 0.1, "exclusiveMaximum": 0.2},
    "integer between": {"type": "integer", "minimum": -3, "maximum": 3},
    "integer of none": {"type": "integer", "minimum": 1.2, "maximum": 1.8},
    "number that is contradictory": {"type": "number", "minimum": 5, "maximum": 4},
    "multiple": {"type": "integer", "multipleOf": 7}, "multiple of a part": {"type": "number", "multipleOf": 0.01},
    "multiple of zero": {"type": "integer", "multipleOf": 0},
    "two types": {"type": ["integer", "null"]}, "no type": {"type": []}, "unknown type": {"type": "decimal"},
    "type that is a number": {"type": 7}, "nullable": {"type": "integer", "nullable": True},
    "nullable of no type": {"type": 7, "nullable": True}, "int32 of no type": {"type": 7, "format": "int32"},
    "nullable that is a text": {"type": "integer", "nullable": "true"},
    "list of few": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    "list of none": {"type": "array", "minItems": 2, "maxItems": 1},
    "unique list": {"type": "array", "uniqueItems": True},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
    "old tuple": {"type": "array", "items": [{"const": 1}]}, "contains": {"type": "array", "contains": {"const": 1}},
    "list of millions": {"type": "array", "minItems": 1000000},
    "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "one of": {"oneOf": [{"const": 1}, {"const": 2}]},
    "one of two alike": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "all of one": {"allOf": [{"type": "integer"}]}, "all of two": {"allOf": [{"type": "integer"}, {"minimum": 5}]},
    "all of contradictions": {"allOf": [{"type": "integer"}, {"type": "string"}]}, "either of none": {"anyOf": []},
    "not": {"not": {"type": "string"}}, "not anything": {"not": {}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "reference to nothing": {"$ref": "#/$defs/none"}, "reference to itself": {"$ref": "#"},
    "reference to a file": {"$ref": "other.json"}, "reference to the web": {"$ref": "https://example.org/schema.json"},
    "reference that is a number": {"$ref": 7},
    "keys of a pattern": {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    "keys of any name": {"type": "object", "additionalProperties": {"type": "integer"}},
    "keys of names": {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}},
    "few keys": {"type": "object", "minProperties": 2, "maxProperties": 3},
    "keys that depend": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "a required key that is none": {"type": "object", "required": ["z"], "additionalProperties": False},
    "unevaluated": {"type": "object", "unevaluatedProperties": False},
    "a key of quotes": {"type": "object", "properties": {'"\\\n': {"type": "integer"}}, "required": ['"\\\n']},
    "an empty key": {"type": "object", "properties": {"": {"type": "integer"}}, "required": [""]},
    "properties that are a list": {"type": "object", "properties": []},
    "required that is a text": {"type": "object", "required": "a"},
    "default and examples": {"type": "integer", "default": "x", "examples": [1], "title": 7, "description": None},
    "content": {"type": "string", "contentEncoding": "base64"}, "deprecated": {"type": "integer", "deprecated": True},
    "unknown keyword": {"type": "integer", "frobnicate": True},
}  # fmt: skip
ODD_SCHEMAS: dict[str, Any] = {
    **{name: part if isinstance(part, dict) else _field(part) for name, part in _PARTS.items()},
    "empty": {}, "a root that is true": _field({"type": "object"}),
    **{f"{depth} deep": _nested(depth) for depth in (1, 16, 64, 128, 250)},
    "recursive": {"$defs": {"node": _TREE}, "$ref": "#/$defs/node"},
    "recursive without an end": {"$defs": {"node": _field({"$ref": "#/$defs/node"})}, "$ref": "#/$defs/node"},
    "references in a ring": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "definitions of old": {"definitions": {"a": {"type": "integer"}}, **_field({"$ref": "#/definitions/a"})},
    "200 fields": {"type": "object", "properties": {f"field_{n}": {"type": "integer"} for n in range(200)},
                   "required": [f"field_{n}" for n in range(200)], "additionalProperties": False},
    "2000 optional fields": {"type": "object", "properties": {f"field_{n}": {"type": "integer"} for n in range(2000)}},
    "a mebibyte": _field({"enum": [letter * (1 << 15) for letter in string.ascii_letters[:32]]}),
    "a description of a mebibyte": _field({"type": "integer", "description": "x" * (1 << 20)}),
}  # fmt: skip


def _many(count: int, schema: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{n}": schema or {"type": "string"} for n in range(count)}, **more}


def _chain(count: int, part: Any) -> dict[str, Any]:
    """References that follow each other."""
    parts = {f"d{n}": part({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
    return {"$defs": {**parts, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


_ENUM = {"enum": ["b", "c"]}
_PATTERNS = {
    "repeats": "^a{0,100000}$", "repeats of repeats": "^((((a{1,50}){1,50}){1,50}){1,50})$",
    "many that may be left out": "^(a?){1000}a{1000}$", "one so many before the end": "(a|b)*a(a|b){18}",
    "three thousand ways": "|".join(f"(x{n}.*y{n}.*)" for n in range(3000)), "brackets": "(" * 20000 + ")" * 20000,
    "any letter of any writing": r"^(\p{L}{1,500}\p{N}{1,500}){1,500}$",
}  # fmt: skip
# Small ones that ask for much, and some of a mebibyte
HARD_SCHEMAS: dict[str, Any] = {
    **{name: _field({"type": "string", "pattern": pattern}) for name, pattern in _PATTERNS.items()},
    "a text of a million": _field({"type": "string", "maxLength": 1000000}),
    "a list of a thousand million": _field({"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
    "a large multiple": _field({"type": "integer", "multipleOf": 999999937}),
    "numbers beyond numbers": _field({"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    "an enum of a mebibyte": _field({"enum": [f"value {n} of them" for n in range(50000)]}),
    "three thousand forms": {"anyOf": [_field({"type": "integer"}, title=str(n)) for n in range(3000)]},
    "either of two, twenty times": {"allOf": [
        {"anyOf": [_many(1, title=f"{n}"), {"properties": {f"b{n}": {"type": "string"}}}]} for n in range(20)]},
    "10000 needed fields": _many(10000, required=[f"k{n}" for n in range(10000)], additionalProperties=False),
    "objects of a mebibyte": _many(11000, {"type": "object", "properties": {"a": _ENUM}, "required": ["a"]}),
    "patterns of keys": {"type": "object", "patternProperties": {f"^.*x{n}.*$": _ENUM for n in range(30)}},
    "4000 references": _chain(4000, lambda next_one: {"type": "object", "properties": {"x": next_one}}),
    "9000 references to either": _chain(9000, lambda next_one: {"anyOf": [next_one, {"type": "integer"}]}),
    "references that double": _chain(25, lambda next_one: {"anyOf": [_field(next_one), next_one]}),
}  # fmt: skip
SLOW_SCHEMAS = {"10000 optional fields": _many(10000)}  # whose compiling is given up
HARD_GRAMMARS = {
    "repeats": "start: TEXT\nTEXT: /[a-z]{0,100000}/", "rules again and again": 'start: s\ns: s s s | s s | "a"',
    "repeats of repeats": "start: TEXT\nTEXT: /(((a{0,100}b{0,100}){0,100}c{0,100}){0,100}d){0,100}/",
    "one so many before the end": "start: TEXT\nTEXT: /.*a.{24}/",
    "without": "start: X\nX: /(.*a.{20}b)/ & ~/(.*b.{20}a)/", "20000 choices": "start: " + " | ".join(
        f'"v{n}"' for n in range(20000)), "a rule 100000 times": 'start: x{0,100000}\nx: "a" | "b"',
    "brackets": "start: " + "(" * 2000 + '"a"' + ")" * 2000, "llama.cpp's": 'root ::= ("a"{0,1000} | "b"{0,1000})*',
    "a chain of rules": "start: r0\n" + "".join(f'r{n}: r{n + 1} | "a"\n' for n in range(3000)) + 'r3000: "b"',
}  # fmt: skip
