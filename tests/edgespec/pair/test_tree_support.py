"""Where rows have few bits, a family whose mixers sum otherwise for several rows takes one token a pass."""

from pathlib import Path

import pytest

from edgespec import TreeSettings
from edgespec.pair.folder import open_model
from edgespec.pair.tree_support import followed_trees, notes_of_support
from tests.support.families import RECURRENT, make_model, save_folder


@pytest.mark.parametrize(("family", "is_alone"), [("mamba", True), ("mamba2", False)])
def test_one_seed_gives_one_text_also_where_rows_would_have_other_bits(
    family: str, is_alone: bool, tmp_path: Path
) -> None:
    target = open_model(save_folder(tmp_path, make_model(RECURRENT[family]())))
    tree = TreeSettings(size=8)
    assert followed_trees(target, tree, keeps_row_bits=False) == tree
    assert notes_of_support(target, keeps_row_bits=False) == ()
    assert followed_trees(target, tree, keeps_row_bits=True) == (tree.plain() if is_alone else tree)
    assert [family in note for note in notes_of_support(target, keeps_row_bits=True)] == [True] * is_alone
