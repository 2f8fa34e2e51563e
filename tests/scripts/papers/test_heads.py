"""Heads against the built-in draft: tokens a second, from tokens a pass and the cost of a step beside its pass."""

from __future__ import annotations

from scripts.papers.heads.equal_cost import DRAFT, PASSES_S, speed_rows


def test_what_a_step_costs_beside_its_pass_matters_less_the_longer_the_pass_is() -> None:
    tokens = {"head": {"chain, T 0": [3.0, 5.0]}, DRAFT: {"chain, T 0": [2.0, 2.0]}}
    seconds = {"head": {"chain, T 0": 0.05}, DRAFT: {"chain, T 0": 0.01}}
    head, draft = speed_rows(tokens, seconds)
    assert head[:3] == ["head: chain, T 0", "4.00", "50.0 ms"]
    assert draft == [f"{DRAFT}: chain, T 0", "2.00", "10.0 ms", "1.00", "1.50", "1.82", "1.94", "1.98"]
    assert [cell.split(",")[0] for cell in head[3:]] == ["0.67", "1.50", "2.67", "3.43", "3.81"]
    assert head[3].endswith("the draft's x 0.67 (0.50 to 0.83)")
    assert len(head) == 3 + len(PASSES_S)
