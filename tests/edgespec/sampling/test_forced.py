"""What a grammar leaves alone is foreseen without a model, and nothing else is."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edgespec import Engine, TreeSettings
from edgespec.draft.lookup import LookedUp
from edgespec.sampling.forced import LIKELY, SURE, forced_tokens
from edgespec.sampling.grammar import Grammar
from edgespec.tuning.lookup_choice import permitted
from tests.edgespec.sampling.test_matcher import END, ids, over_tokens


def forced(text: str, written: str = "", *, most: int = 20) -> list[tuple[int, float]]:
    matcher = over_tokens(Grammar(form="grammar", text=text)).matcher()
    matcher.add(ids(written))
    return forced_tokens(matcher, most)


def test_tokens_that_are_alone_come_one_below_the_other_and_the_end_with_them() -> None:
    found = forced('root ::= [ab] "cde" [01] "."')
    assert found == [], "two may come"
    assert forced('root ::= [ab] "cde" [01] "."', "a") == [(token, SURE) for token in ids("cde")]
    assert forced('root ::= [ab] "cde" [01] "."', "a", most=2) == [(token, SURE) for token in ids("cd")]
    assert forced('root ::= [ab] "cde" [01] "."', "acde0") == [(token, SURE) for token in (*ids("."), END)]


class Spelled:
    """Two tokens may come first, of which one begins the tokenizer's own spelling; then one is alone."""

    def add(self, tokens: Any) -> None:
        raise AssertionError

    def allowed(self, path: Any) -> Any:
        import torch

        tokens = {0: [1, 2], 1: [3, 4], 2: [5], 3: [6, 7]}[len(path)]
        return torch.isin(torch.arange(9), torch.tensor(tokens))

    def likely(self, path: Any) -> list[int]:
        return [2, 3] if not path else []


def test_a_text_of_several_spellings_is_likely_and_not_sure() -> None:
    assert forced_tokens(Spelled(), 9) == [(2, LIKELY), (3, LIKELY), (5, SURE)]
    assert forced_tokens(Spelled(), 1) == [(2, LIKELY)]


def test_what_was_looked_up_has_no_token_that_the_grammar_forbids() -> None:
    found = [LookedUp(-1, 1, 0.5, 1), LookedUp(-1, 2, 0.4, 1), LookedUp(0, 3, 0.3, 2), LookedUp(1, 4, 0.2, 2)]
    assert permitted(found, lambda _path, token: token != 1) == [LookedUp(-1, 2, 0.4, 1), LookedUp(0, 4, 0.2, 2)]
    assert permitted(found, lambda path, token: (path, token) != ((1,), 3)) == [*found[:2], found[3]]
    assert permitted(found, lambda _path, _token: False) == []


SCHEMA = {
    "type": "object",
    "properties": {"function": {"type": "string", "maxLength": 12}, "arguments": {"type": "integer"},
                   "pure": {"type": "boolean"}, "kind": {"enum": ["reader", "writer"]}},
    "required": ["function", "arguments", "pure", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
GRAMMARS: dict[str, dict[str, Any]] = {
    "record": {"json_schema": SCHEMA},
    "nested": {"json_schema": SCHEMA | {"properties": SCHEMA["properties"] | {"pure": {
        "type": "array", "minItems": 2, "maxItems": 2, "items": {"enum": ["yes, it is", "no, it is not"]}}}}},
    "blanks": {"json_schema": {name: value for name, value in SCHEMA.items() if name != "x-guidance"}},
    "choice": {"grammar": 'start: "the first of the choices" | "the second of the choices"'},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(dtype="float32", self_check=False, context_tokens=512) as found:
        yield found


def passes(engine: Engine, tree: TreeSettings, **options: Any) -> tuple[tuple[int, ...], int]:
    engine.use_tree(tree)
    engine.forget()
    result = engine.generate("# Describe main(argv)\n", max_new_tokens=150, seed=3, **options)
    return result.token_ids, len(result.passes)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_decoding_in_far_fewer_passes(engine: Engine, name: str, temperature: float) -> None:
    options = GRAMMARS[name] | {"temperature": temperature}
    text, plain = passes(engine, TreeSettings(policy="none"), **options)
    if name != "choice":
        json.loads(engine.pair.tokenizer.decode(text, skip_special_tokens=True))
    trees = {
        "forced tokens alone": TreeSettings(policy="lookup", size=16),
        "a draft whose nodes are masked": TreeSettings(size=16, lookup=False),
        "both": TreeSettings(size=16),
    }
    found = {what: passes(engine, tree, **options) for what, tree in trees.items()}
    assert all(own == text for own, _ in found.values())
    most = {"forced tokens alone": 0.8 if name == "blanks" else 0.6, "a draft whose nodes are masked": 0.4, "both": 0.4}
    assert {what: count for what, (_, count) in found.items() if count > most[what] * plain} == {}
