"""The JSON schema or the grammar that a text must match, as the user wrote it; `matcher` applies it to tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.errors import EdgespecError
from edgespec.validation import parse_json

ANY_OBJECT = '{"type": "object"}'  # of OpenAI's json_object
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
# Between the parts of JSON, as llama.cpp bounds it: a model that may write white space without end does.
WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
# The keywords of a schema, its drafts' and OpenAPI's: those that a text is held to, and those that constrain nothing.
FOLLOWED = frozenset({
    "$ref", "$anchor", "$id", "id", "$schema", "$defs", "definitions", "components", "type", "enum", "const",
    "nullable", "allOf", "anyOf", "oneOf", "properties", "patternProperties", "additionalProperties", "required",
    "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "x-guidance",
})  # fmt: skip
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "xml", "externalDocs",
    "enumNames", "enumDescriptions", "enumItemLabels", "markdownDescription", "propertyOrdering",
})  # fmt: skip
_OF_TRUTH = {"nullable": True, "required": False}  # whether its value is true or false; the latter was, once
_EXTENSION = "x-"  # begins an annotation of any name
# Which keywords of a schema have a schema, a list of them, or named ones.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SHARED = ("$schema", "$id", "$defs", "definitions", "components", "x-guidance")  # of a whole schema
_SAYS_MORE = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"}
_MERGES = {"oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar that is not checked yet; `matcher.token_grammar` does."""

    form: Literal["json_schema", "grammar"]  # the latter in Lark's form, or in llama.cpp's GBNF
    text: str
    answer: Grammar | None = None  # what `@answer` in the text stands for


def json_schema_grammar(schema: str | Mapping[str, Any]) -> Grammar:
    """Return the grammar of JSON that fits a schema, given as JSON or as an object; raises EdgespecError."""
    try:
        schema = schema if isinstance(schema, str) else json.dumps(schema)
        found = parse_json(schema)
    except (ValueError, TypeError, RecursionError) as error:  # the last two of an object that JSON has no form for
        raise refused("the JSON schema", f"it is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise refused("the JSON schema", "it is no JSON object")
    return Grammar(form="json_schema", text=schema)


def response_format_grammar(value: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of OpenAI's `response_format`, None for any text; raises EdgespecError."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # as llama.cpp has it
        return json_schema_grammar(ANY_OBJECT if schema is None else schema)
    if kind != "json_schema":
        what = f"response_format has type {json.dumps(kind)}, which is unknown."
        raise EdgespecError("E_GRAMMAR", what, f"Use one of: {', '.join(RESPONSE_FORMATS)}.")
    wrapper = value.get("json_schema")
    wrapper = value if wrapper is None else wrapper  # as llama.cpp has it
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        fix = 'Write {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}.'
        raise EdgespecError("E_GRAMMAR", "response_format of type json_schema has no schema.", fix)
    return json_schema_grammar(schema)


def schema_to_follow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as the library has to read it; raises EdgespecError for a keyword that nothing would follow.

    What is `nullable` may be null. Objects have the properties that they list, and others only where it says so:
    OpenAI, llama.cpp and vLLM have it so, and a model that may add properties of any name does, some without end. In a
    schema that makes objects of several, objects stay as they are: one part may not know the others' properties.
    """
    found: dict[str, Any] = json.loads(json.dumps(schema))
    options, parts = found.get("x-guidance"), _parts(found)
    is_lenient = isinstance(options, dict) and bool(options.get("lenient"))
    for part in parts:
        _check_keywords(part, is_lenient=is_lenient)
        _bound_int32(part)
        if part.pop("nullable", None) is True:
            _take_null(part)
    parts = _parts(found)
    if not any(map(_is_merged, parts)):
        for part in parts:
            listed, needed = part.get("properties"), part.get("required", [])
            if isinstance(listed, dict) and isinstance(needed, list) and not _SAYS_MORE & part.keys():
                part |= {"additionalProperties": False} if all(name in [*listed] for name in needed) else {}
    return found


def _parts(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a schema and all those within it."""
    parts = [schema]
    for part in parts:  # which grows, because a schema may be deeper than Python's calls
        below = [part.get(name) for name in _ONE]
        below += [one for name in _LISTS if isinstance(part.get(name), list) for one in part[name]]
        below += [one for name in _NAMED if isinstance(part.get(name), dict) for one in part[name].values()]
        if part is schema and isinstance(named := part.get("components"), dict):  # as OpenAPI has what is referred to
            below += named["schemas"].values() if isinstance(named.get("schemas"), dict) else ()
        parts += [one for one in below if isinstance(one, dict)]
    return parts


def _check_keywords(part: Mapping[str, Any], *, is_lenient: bool) -> None:
    """Raise EdgespecError for a part of a schema that has a keyword which no text is held to."""
    for name, value in part.items():
        if not (name in FOLLOWED or name in ANNOTATIONS or name.startswith(_EXTENSION) or is_lenient):
            raise refused("the JSON schema", f"{json.dumps(name)} is no keyword that is followed")
        if name in _OF_TRUTH and isinstance(value, bool) != _OF_TRUTH[name]:
            raise refused("the JSON schema", f"{json.dumps(name)} is {json.dumps(value)}")


def _kinds(part: Mapping[str, Any]) -> list[str]:
    kinds = part.get("type", [])
    return [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]


def _bound_int32(part: dict[str, Any]) -> None:
    """Put OpenAPI's whole numbers of 32 bits into bounds; another format of a number constrains nothing."""
    if part.get("format") == "int32" and {"integer", "number"} & {*_kinds(part)}:
        del part["format"]
        for name, bound, narrower in (("minimum", -(2**31), max), ("maximum", 2**31 - 1, min)):
            own = part.get(name, bound)
            part[name] = narrower(own, bound) if isinstance(own, int | float) else own


def _take_null(part: dict[str, Any]) -> None:
    """Let a part of a schema be null, too."""
    if {"enum", "const", "$ref", "allOf", "anyOf", "oneOf"} & part.keys():
        shared = {name: part.pop(name) for name in _SHARED if name in part}
        own = {**part}
        part.clear()
        part |= {**shared, "anyOf": [own, {"type": "null"}]}
    elif kinds := _kinds(part):
        part["type"] = list(dict.fromkeys([*kinds, "null"]))


def _is_merged(part: Mapping[str, Any]) -> bool:
    """Return whether a part of a schema makes an object of several."""
    if _MERGES & part.keys() or ("allOf" in part and not (isinstance(part["allOf"], list) and len(part["allOf"]) == 1)):
        return True
    return bool({"properties", "required"} & part.keys() and {"allOf", "anyOf", "$ref"} & part.keys())


def bounded_json(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose JSON has little white space, unless its own `x-guidance` says what there may be."""
    options = schema.get("x-guidance", {})
    is_bounded = not isinstance(options, Mapping) or any(name.startswith("whitespace") for name in options)
    return {**schema} if is_bounded else {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, **options}}


def compact_json(grammar: Grammar) -> Grammar:
    """Return a schema whose JSON has no white space between its parts."""
    schema = json.loads(grammar.text)
    options = schema.get("x-guidance")
    options = {**(options if isinstance(options, Mapping) else {}), "whitespace_flexible": False}
    return Grammar(form=grammar.form, text=json.dumps({**schema, "x-guidance": options}))


def refused(what: str, why: str) -> EdgespecError:
    """Return the error of a grammar that cannot be followed."""
    return EdgespecError("E_GRAMMAR", f"{what} cannot be followed: {why}.", "Correct it, or leave the part out.")


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of one of these texts, none of which is empty."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def regex_grammar(expression: str) -> str:
    """Return the grammar of texts that match a regular expression as a whole."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", expression, flags=re.DOTALL).replace("\n", r"\n")
    return f"start: TEXT\nTEXT: /{escaped}/"
