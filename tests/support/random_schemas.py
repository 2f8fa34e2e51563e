"""Random JSON schemas as people write them: records within records, enums, bounds, nullable, unions, references."""

import random
from typing import Any

DEPTH = 3  # of records and lists
WORDS = ("first", "second one", 'a "quoted" word', "é", "", "true", "10")


def random_schema(number: int) -> dict[str, Any]:
    """Return the schema of a record; a number has one."""
    draw = random.Random(number)
    node: dict[str, Any] = _record({"value": _leaf(draw)}, ["value", "next"])
    node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    found = _object(draw, DEPTH) | {"$defs": {"node": node, "leaf": _leaf(draw)}}
    return found | ({"x-guidance": {"whitespace_flexible": False}} if draw.random() < 0.75 else {})


def _part(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_leaf] * 4 + ([_object, _array, _union, _reference, _nullable] if depth else [])
    kind = draw.choice(kinds)
    return _leaf(draw) if kind is _leaf else kind(draw, depth - 1)


def _record(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(["id", "name", "a key with blanks", "é", "kind", "list_of_things"], draw.randint(1, 4))
    return _record({name: _part(draw, depth) for name in names}, draw.sample(names, draw.randint(1, len(names))))


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {"type": "array", "items": _part(draw, depth), "minItems": least, "maxItems": draw.randint(max(1, least), 3)}


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_part(draw, depth) for _ in range(draw.randint(1, 3))]}


def _reference(draw: random.Random, _depth: int) -> dict[str, Any]:
    found = {"$ref": f"#/$defs/{draw.choice(['node', 'leaf'])}"}
    return {"allOf": [found]} if draw.random() < 0.2 else found


def _nullable(draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": [draw.choice(["boolean", "integer"]), "null"]}


def _leaf(draw: random.Random) -> dict[str, Any]:
    least = draw.randint(-20, 20)
    least_number = round(draw.uniform(-5, 5), 2)
    return draw.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": draw.choice([*WORDS, 7, -1.5, None, False])},
            {"enum": draw.sample([*WORDS, 1, 10, 100, None, True], draw.randint(1, 5))},
            {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 9)},
            {"type": "string", "pattern": draw.choice(["^[A-Z]{2}-[0-9]{3}$", "^(on|off)$", "^x{0,4}$"])},
            {"type": "string", "format": draw.choice(["date", "time", "ipv4", "uuid"])},
            {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 300)},
            {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + draw.randint(2, 300)},
            {"type": "number", "minimum": least_number, "maximum": least_number + draw.randint(1, 90)},
        ]
    )
