"""The tables of scripts/papers.py: what contexts note becomes means, and a draft call has its price."""

import re

import torch

from scripts.paper_tables.paper_table import in_bins, in_words, shares
from scripts.paper_tables.speeds import COSTS, show_gain, show_speeds
from scripts.papers import MODULES, TABLES


def test_every_table_has_a_name_of_its_own() -> None:
    assert len(TABLES) == sum(len(module.TABLES) for module in MODULES)


def test_bins_hold_weighted_sums() -> None:
    where, what = torch.tensor([0.05, 0.09, 0.95, 1.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    sums = in_bins(where, what, torch.tensor([3.0, 1.0, 1.0, 1.0]))
    assert sums[0].tolist() == [3.0, 4.0]
    assert sums[9].tolist() == [2.0, 2.0]
    assert shares([sums, sums])[:2] == ["0.750 (0.750 to 0.750)", "-"]


def test_intervals_are_of_contexts() -> None:
    assert in_words([2.0] * 9) == "2.00 (2.00 to 2.00)"
    mean, low, high = map(float, re.findall(r"[\d.]+", in_words([1.0, 3.0] * 50)))
    assert mean == 2.0
    assert 1.7 < low < 1.9
    assert 2.1 < high < 2.3


def test_speeds_count_a_pass_and_its_draft_calls() -> None:
    found = [[(2.0, 1.0), (3.0, 5.0)]] * 4  # two tokens a pass from one layer, three from five
    short, long = show_speeds("tree", ["short", "long"], found)[2:]
    for column, cost in enumerate(COSTS):
        first, second = (row.split("|")[4 + column].strip() for row in (short, long))
        assert first.strip("*").startswith(f"{2 / (1 + cost):.2f}")
        assert second.strip("*").startswith(f"{3 / (1 + 5 * cost):.2f}")
        assert first.startswith("**") == (2 / (1 + cost) >= 3 / (1 + 5 * cost))
    assert "1.391 (1.391 to 1.391) at mu 0.02" in show_gain("long over short", [1], [0], found)
