"""What is said of a pair that is set up: trees that texts depend on do not follow what pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.cli.open_engine import trees_in_words
from edgespec.tree.settings import TreeSettings

OWN = TreeSettings(policy="eagle2", size=12, depth=2)
TUNED = "of up to 256 nodes, as many as pay"


@pytest.mark.parametrize(
    ("tree", "is_tuned", "words"),
    [
        (OWN, False, "eagle2 trees of 12 nodes, depth 2"),
        (OWN, True, f"eagle2 trees {TUNED}"),
        (replace(OWN, draw="chosen"), False, "eagle2 trees of 12 nodes, depth 2"),
        (replace(OWN, draw="chosen"), True, f"eagle2 trees of 12 nodes, depth 2; at temperature 0 {TUNED}"),
        (OWN.plain(), False, "no tree"),
    ],
)
def test_trees_are_said_to_be_tuned_where_no_text_depends_on_them(
    tree: TreeSettings, is_tuned: bool, words: str
) -> None:
    assert trees_in_words(tree, largest_tree=replace(tree, size=256) if is_tuned else None) == words
