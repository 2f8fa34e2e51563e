"""A few answers as models write them, of every family, come whole to clients; what is lost or broken is seen."""

import pytest

from scripts.check.calls import check
from scripts.check.written_calls import FAMILIES, Family


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_nothing_of_a_few_answers_is_lost(family: Family) -> None:
    counts = check(family, range(60))
    assert not counts.faults
    assert counts.calls
    assert counts.cut
    assert counts.as_meant
