"""The JSON schema or the grammar that a text must match, as the user wrote it; `matcher` applies it to tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.errors import EdgespecError
from edgespec.inputs import parse_json

ANY_OBJECT = '{"type": "object"}'  # of OpenAI's json_object
RESPONSE_FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar that is not checked yet; `matcher.token_grammar` does."""

    form: Literal["json_schema", "grammar"]  # the latter in Lark's form, or in llama.cpp's GBNF
    text: str


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
        return Grammar(form="json_schema", text=ANY_OBJECT)
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


def refused(what: str, why: str) -> EdgespecError:
    """Return the error of a grammar that cannot be followed."""
    return EdgespecError("E_GRAMMAR", f"{what} cannot be followed: {why}.", "Correct it, or leave the part out.")
