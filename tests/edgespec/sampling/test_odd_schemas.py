"""Schemas as nobody should write them: each is followed or refused by name, soon, and nothing else happens."""

from __future__ import annotations

import time

import pytest

from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import json_schema_grammar
from tests.edgespec.sampling.test_matcher import over_tokens
from tests.support.odd_schemas import ODD_SCHEMAS

MOST_S = 5.0


@pytest.mark.parametrize("schema", ODD_SCHEMAS)
def test_an_odd_schema_is_followed_or_refused_by_name(schema: str) -> None:
    started, codes = time.process_time(), set[str]()
    try:
        matcher = over_tokens(json_schema_grammar(ODD_SCHEMAS[schema])).matcher()
        written: list[int] = []
        while len(written) < 20 and (allowed := matcher.allowed(())) is not None:
            assert bool(allowed.any()), "a text that goes on with nothing"
            written.append(int(allowed.int().argmax()))
            matcher.add(written[-1:])
    except EdgespecError as error:
        codes.add(error.code)
    assert codes <= {"E_GRAMMAR"}
    assert time.process_time() - started < MOST_S
