"""Schemas as nobody should write them: each is followed or refused by name, soon, and nothing else happens."""

import time

import pytest

from edgespec.errors import EdgespecError
from edgespec.sampling import matcher
from edgespec.sampling.grammar import Grammar, json_schema_grammar
from tests.edgespec.sampling.test_matcher import over_tokens
from tests.support.odd_schemas import HARD_GRAMMARS, HARD_SCHEMAS, ODD_SCHEMAS, SLOW_SCHEMAS

MOST_S = 5.0
ALL = {name: json_schema_grammar(schema) for name, schema in {**ODD_SCHEMAS, **HARD_SCHEMAS}.items()}
ALL |= {f"grammar: {name}": Grammar(form="grammar", text=text) for name, text in HARD_GRAMMARS.items()}


@pytest.mark.parametrize("name", ALL)
def test_an_odd_schema_is_followed_or_refused_by_name(name: str) -> None:
    started, codes = time.process_time(), set[str]()
    try:
        found = over_tokens(ALL[name]).matcher()
        written: list[int] = []
        while len(written) < 20 and (allowed := found.allowed(())) is not None:
            assert bool(allowed.any()), "a text that goes on with nothing"
            written.append(int(allowed.int().argmax()))
            found.add(written[-1:])
    except EdgespecError as error:
        codes.add(error.code)
    assert codes <= {"E_GRAMMAR"}
    assert time.process_time() - started < MOST_S


def test_a_schema_that_takes_longer_than_it_may_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MAX_COMPILE_S", 0.1)
    with pytest.raises(EdgespecError, match="the JSON schema cannot be followed: it takes longer than"):
        over_tokens(json_schema_grammar(SLOW_SCHEMAS["10000 optional fields"]))
