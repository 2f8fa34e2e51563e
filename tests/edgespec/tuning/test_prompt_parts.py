"""A part of a prompt: as long as nobody waits too long for it, and so long that reading stays fast."""

from __future__ import annotations

import pytest

from edgespec.tuning.prompt_parts import ALONE_S, MOST_ROWS, OVERHEAD, SHARED_S, PromptParts
from edgespec.tuning.step import PassCost

UNIT = 512


def a_pass(parts: PromptParts, rows: int, *, pass_s: float, row_s: float, num_texts: int = 0) -> None:
    parts.observe(
        PassCost(
            num_texts=num_texts, num_rows=num_texts, num_prompt_rows=rows, num_layers=None, num_drafted=0,
            num_unread=0, grow_s=0.0, target_s=pass_s + row_s * rows, rest_s=0.0,
        )
    )  # fmt: skip


def known(*, pass_s: float, row_s: float, reads_once: bool = False) -> PromptParts:
    parts = PromptParts(reads_once=reads_once)
    a_pass(parts, 0, pass_s=pass_s, row_s=row_s, num_texts=1)
    a_pass(parts, UNIT, pass_s=pass_s, row_s=row_s)
    return parts


def test_nothing_is_known_at_first() -> None:
    for is_shared in (False, True):
        assert PromptParts(reads_once=False).num_rows(UNIT, is_shared=is_shared) == UNIT
        assert PromptParts(reads_once=True).num_rows(UNIT, is_shared=is_shared) is None


@pytest.mark.parametrize("row_s", [1e-6, 2e-5, 1e-4, 4e-4, 1.3e-3, 0.1])
@pytest.mark.parametrize("pass_s", [1e-4, 0.02, 0.1])
def test_nobody_waits_longer_than_is_said_where_weights_stay(pass_s: float, row_s: float) -> None:
    parts = known(pass_s=pass_s, row_s=row_s)
    for is_shared, most_s in ((True, SHARED_S), (False, ALONE_S)):
        rows = parts.num_rows(UNIT, is_shared=is_shared)
        assert rows is not None
        assert rows == UNIT or pass_s + row_s * rows <= most_s
        if rows < MOST_ROWS and is_shared:
            assert pass_s + row_s * 2 * rows > most_s, "no shorter than it need be"
    alone, shared = (parts.num_rows(UNIT, is_shared=is_shared) or 0 for is_shared in (False, True))
    assert alone >= shared
    share = pass_s / (pass_s + row_s * alone)
    assert share <= OVERHEAD or alone == MOST_ROWS or pass_s + row_s * 2 * alone > ALONE_S


def test_while_weights_stream_a_part_takes_many_times_what_a_pass_takes_by_itself() -> None:
    assert known(pass_s=20.0, row_s=5e-3, reads_once=True).num_rows(UNIT, is_shared=True) is None
    rows = known(pass_s=0.1, row_s=1.5e-3, reads_once=True).num_rows(UNIT, is_shared=True)
    assert rows == 4096
    assert OVERHEAD * (0.1 + 1.5e-3 * rows) >= 0.1


def test_one_slow_pass_makes_no_part_shorter() -> None:
    parts = known(pass_s=0.02, row_s=1e-4)
    before = parts.num_rows(UNIT, is_shared=True)
    for _ in range(2):
        a_pass(parts, UNIT, pass_s=0.02, row_s=1e-4)
    a_pass(parts, UNIT, pass_s=0.02, row_s=5e-2)
    assert parts.num_rows(UNIT, is_shared=True) == before
