"""Rules of arguments whose keys have no quotes, and whose texts stand between marks of their own (Gemma 4).

Keys come in the order in which the family's chat template sorts them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from edgespec.chat.answer import AnswerFormat
from edgespec.chat.answer_frame import either, quoted, symbol, until, words
from edgespec.chat.call_values import KINDS, referred
from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import ANNOTATIONS

TEXT_BOUNDS = ("pattern", "format", "minLength", "maxLength")
_KEY = r'[^\s"{}\[\],:<]([^"{}\[\],:<\n]*[^\s"{}\[\],:<])?'
_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MADE_OF = dict.fromkeys(("$ref", "allOf", "anyOf", "oneOf")).keys()
_HELD = {"type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems",
         "maxItems", *TEXT_BOUNDS, *_NUMBER_BOUNDS}  # fmt: skip
_SAYS_NOTHING = {*ANNOTATIONS, "$id", "id", "$schema", "$defs", "definitions", "components", "x-guidance"}
_KINDS = (*dict.fromkeys(KINDS.values()),)


def bare_rules(answer_format: AnswerFormat) -> list[str]:
    """Return the rules of any value."""
    quote = answer_format.call["quote"]
    text = [*words(answer_format, "bare", [quote]), *until(answer_format, "bare_end", "bare", quote, [quote])]
    scalar = json.dumps({"type": ["number", "boolean", "null"]})
    return [
        f"bare_text: {symbol(answer_format, quote)} bare_end",
        f"bare_any: bare_text | bare_object | bare_list | %json {scalar}",
        'bare_object: "{" (bare_pair ("," bare_pair)*)? "}"',
        'bare_list: "[" (bare_any ("," bare_any)*)? "]"',
        'bare_pair: BARE_KEY ":" bare_any',
        f"BARE_KEY: /{_KEY}/",
        *text,
    ]


class BareArguments:
    """The rules of a tool's arguments, by its schema; with `is_strict` what they cannot hold is an EdgespecError."""

    def __init__(self, answer_format: AnswerFormat, schema: Mapping[str, Any], prefix: str, *, is_strict: bool) -> None:
        self._quote, self._is_strict = symbol(answer_format, answer_format.call["quote"]), is_strict
        self._root, self._prefix = schema, prefix
        self._named = dict[tuple[str, tuple[str, ...]], str]()  # references, which may refer to themselves
        self.rules = list[str]()

    def value(self, schema: Any, kinds: Sequence[str] = _KINDS) -> str:
        """Return what a value of a schema is, of these kinds; its rules are noted."""
        if schema is False:
            raise unheld("nothing fits a part of the schema")
        schema = {} if schema is True else schema
        self._bound(schema, _HELD | _MADE_OF)
        named = schema.get("type", kinds)
        named = {named} if isinstance(named, str) else {*named}
        named |= {"integer"} if "number" in named else set()
        kinds = [kind for kind in kinds if kind in named]
        if made_of := next((name for name in _MADE_OF if name in schema), None):
            self._bound(schema, {"type", made_of})
            if made_of == "$ref" or "properties" not in schema:
                return self._made_of(made_of, schema[made_of], kinds)
        if "enum" in schema or "const" in schema:
            chosen = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
            return self._one_of([value for value in chosen if KINDS[type(value)] in kinds])
        if not kinds:
            raise unheld("a part of the schema has no type that fits")
        if kinds == [*_KINDS] and _HELD.isdisjoint(schema):
            return "bare_any"
        return f"({' | '.join(self._of_kind(kind, schema) for kind in kinds)})"

    def _bound(self, schema: Mapping[str, Any], held: Set[str]) -> None:
        """Raise EdgespecError for a part of a strict schema that is not held."""
        found = next((name for name in schema if name not in held | _SAYS_NOTHING and not name.startswith("x-")), None)
        if found is not None and self._is_strict:
            raise unheld(f"a part of the schema has {json.dumps(found)}")

    def _made_of(self, name: str, value: Any, kinds: Sequence[str]) -> str:
        if name == "$ref":
            key = (value, tuple(kinds))
            if key not in self._named:
                self._named[key] = rule = f"{self._prefix}_r{len(self._named)}"
                found = referred(value, self._root)
                if found is None:
                    raise unheld(f"the reference {json.dumps(value)} names nothing in the schema")
                self.rules.append(f"{rule}: {self.value(found, kinds)}")
            return self._named[key]
        if name == "allOf" and len(value) > 1:
            self._bound({name: value}, set())
            return self.value({}, kinds)
        return f"({' | '.join(self.value(one, kinds) for one in value)})"

    def _one_of(self, values: Sequence[Any]) -> str:
        if not values:
            raise unheld("a part of the schema allows no value")
        if any(isinstance(value, dict | list) for value in values):
            self._bound({"enum": values}, set())
            return "bare_any"
        texts = [self._between(value) if isinstance(value, str) else quoted(json.dumps(value)) for value in values]
        return f"({' | '.join(texts)})"

    def _between(self, text: str) -> str:
        return f"{self._quote} {f'{quoted(text)} ' if text else ''}{self._quote}"

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            self._bound(schema, _HELD - {*TEXT_BOUNDS})
            return "bare_text"
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            item, least, most = self.value(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems")
            if most is not None and most < max(1, least):
                return '"[]"' if least == 0 else self._one_of([])
            others = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
            return f'"[" {item} {others} "]"' if least else f'"[" ({item} {others})? "]"'
        bounds = {name: schema[name] for name in _NUMBER_BOUNDS if name in schema and kind in ("integer", "number")}
        return f"%json {json.dumps({'type': kind, **bounds})}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        rule = f"{self._prefix}_o{len(self.rules)}"
        self.rules.append("")  # its place, which a schema within it must not take
        place, needed = len(self.rules) - 1, set(schema.get("required", ()))
        pairs = list(self._pairs(schema, needed))
        others = schema.get("additionalProperties", True)
        firsts, rests = list[str](), list[str]()
        for number, (key, pair) in enumerate(pairs):
            rests.append(f'{rule}_{number}: ("," {pair}){"" if key in needed else "?"} {rule}_{number + 1}')
            if needed.isdisjoint(earlier for earlier, _ in pairs[:number]):
                firsts.append(f"{pair} {rule}_{number + 1}")
        other = "" if others is False else f'{rule.upper()} ":" {self.value(others)}'
        rests.append(f"{rule}_{len(pairs)}: " + (f'("," {other})*' if other else '""'))
        if other:
            names = either([key for key, _ in pairs])
            rests.append(f"{rule.upper()}: /{_KEY}/" + (f" & ~/{names}/" if names else ""))
        is_empty = needed.isdisjoint(key for key, _ in pairs)
        firsts += [f"{other} {rule}_{len(pairs)}"] if other and is_empty else []
        inside = f"({' | '.join(firsts)}){'?' if is_empty else ''}" if firsts else ""
        self.rules[place] = f'{rule}: "{{" {inside} "}}"'
        self.rules += rests
        return rule

    def _pairs(self, schema: Mapping[str, Any], needed: set[str]) -> Iterator[tuple[str, str]]:
        """Yield each key with the rule of its pair; those that are needed and have no schema are any value."""
        properties = schema.get("properties", {})
        for key in sorted({*properties, *needed}, key=str.lower):
            if not re.fullmatch(_KEY, key):
                raise unheld(f"{json.dumps(key)} is no key without quotes")
            yield key, f"{quoted(key + ':')} {self.value(properties.get(key, True))}"


def unheld(what: str) -> EdgespecError:
    """Return the error of a tool's schema that a family's own writing of calls cannot follow."""
    what = f"'strict' cannot be enforced for this model, whose calls are no JSON: {what}."
    return EdgespecError("E_GRAMMAR", what, "Leave 'strict' out, or that part of the schema.")
