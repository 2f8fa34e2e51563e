"""How long measuring may take."""

from __future__ import annotations

import pytest

from edgespec.tune.run import FULL, QUICK


@pytest.mark.parametrize(("pass_s", "allowed_s"), [(0.004, 60), (0.15, 180), (70.0, 240)])
def test_slow_passes_are_given_more_time_within_bounds(pass_s: float, allowed_s: float) -> None:
    assert QUICK.allowed_s(pass_s) == allowed_s
    assert FULL.allowed_s(pass_s) >= 5 * 60
