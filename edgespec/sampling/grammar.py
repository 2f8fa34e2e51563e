"""The JSON schema or the grammar that a text must match, as the user wrote it; `matcher` applies it to tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.errors import EdgespecError
from edgespec.validation import parse_json

ANY_OBJECT = '{"type": "object"}'  # of OpenAI's json_object
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
# Between the parts of JSON, as llama.cpp bounds it: a model that may write white space without end does.
WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})?"


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
        raise EdgespecError(
            "E_GRAMMAR",
            f"response_format has type {json.dumps(kind)}, which is unknown.",
            f"Use one of: {', '.join(RESPONSE_FORMATS)}.",
        )
    wrapper = value.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        raise EdgespecError(
            "E_GRAMMAR",
            "response_format of type json_schema has no schema.",
            'Write {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}.',
        )
    return json_schema_grammar(schema)


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
