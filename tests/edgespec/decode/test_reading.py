"""Parts of prompts end where the rows of a pass are cut anyway: their bits do not depend on how many a pass reads."""

from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.model.target import Target

UNIT = 8


@pytest.mark.parametrize("num_read", [0, 5, 8, 13])
@pytest.mark.parametrize("most", [1, 7, 8, 12, 24, 60])
def test_a_part_ends_at_a_multiple_or_with_the_prompt(num_read: int, most: int) -> None:
    target: Any = SimpleNamespace(num_read=num_read, num_unread=50, part_rows=UNIT, seen=None, reads_whole=False)
    count = Target.rows_within(target, most)
    assert 0 <= count <= max(most, 50 if most >= 50 else 0)
    assert count == 50 or (num_read + count) % UNIT == 0 or count == 0
    if most >= UNIT:
        assert count > 0, "it goes on"


def test_a_family_that_would_read_the_rows_before_again_reads_all() -> None:
    target: Any = SimpleNamespace(num_read=0, num_unread=50, part_rows=UNIT, seen=None, reads_whole=True)
    assert Target.rows_within(target, 1) == 50
