"""Static shapes, and trees that are read from files."""

import json
from pathlib import Path

import pytest
import torch

from edgespec.errors import EdgespecError
from edgespec.tree.shapes import PRESETS, TreeShape, chain, expansion, from_paths, read_shape
from edgespec.tree.token_tree import ancestors_mask

SHAPES = [
    expansion((4, 2, 2, 1)),
    expansion((3, 1, 1, 1)),
    chain(5),
    from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]),
]


def test_expansions_have_so_many_children_in_every_layer() -> None:
    assert expansion((4, 2, 2, 1)).layer_ends == (1, 5, 13, 29, 45)
    assert expansion((2, 1)) == TreeShape((-1, 0, 0, 1, 2))
    assert expansion((2, 1)).ranks == (0, 0, 1, 0, 0)


def test_a_chain_has_one_node_in_every_layer() -> None:
    assert expansion((3, 1)) == TreeShape((-1, 0, 0, 0, 1, 2, 3))
    assert chain(3) == TreeShape((-1, 0, 1, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.num_nodes))
def test_the_mask_of_a_shorter_tree_is_a_corner_of_the_whole(shape: TreeShape) -> None:
    """Improving-MCSD's dynamic sliced mask."""
    whole = ancestors_mask(torch.tensor(shape.parents))
    for depth, end in enumerate(shape.layer_ends):
        assert torch.equal(whole[:end, :end], ancestors_mask(torch.tensor(shape.parents[:end])))
        assert max(shape.depths[:end]) == depth


def test_paths_may_stand_in_any_order() -> None:
    assert from_paths([(1, 0), (0,), (0, 0), (1,)]) == TreeShape((-1, 0, 0, 1, 2))


def test_files_hold_paths_or_parents(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [1], [0, 0]]))
    assert read_shape(file) == TreeShape((-1, 0, 0, 1))
    file.write_text(json.dumps({"parents": [-1, 0, 0, 1]}))
    assert read_shape(file) == TreeShape((-1, 0, 0, 1))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[[0], [2]]", "rank 1"),
        ("[[0], [0]]", "stands twice"),
        ("[[0], [1, 0]]", r"no parent \[1\]"),
        ("[[0], [-1]]", r"\[-1\]"),
        ("[[0.5]]", r"\[0.5\]"),
        ("[[]]", "no path"),
        ("[]", "0 nodes"),
        ("[[true]]", "no path"),
        ("[NaN]", "no path"),
        ('"x"', "neither"),
        ("{", "JSON"),
        ('{"parents": [-1, 1]}', "node 1 has parent 1"),
        ('{"parents": [-1, 0, 1, 0]}', "layer order"),
        ('{"parents": [0, 0]}', "node 0"),
        ('{"parents": 3}', "no list"),
        ('{"nodes": []}', "nodes"),
        (json.dumps([[rank] for rank in range(769)]), "769"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_what_is_no_tree_is_named(content: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(EdgespecError, match=named) as raised:
        read_shape(file)
    assert "tree.json" in raised.value.what


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match=r"nowhere\.json") as raised:
        read_shape(tmp_path / "nowhere.json")
    assert all(name in raised.value.fix for name in PRESETS)


def test_published_trees_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: read_shape(Path(name)).layer_ends for name in PRESETS} == {
        "eagle-1": (1, 5, 13, 21, 24, 26),
        "medusa": (1, 11, 39, 62, 64),
    }
    monkeypatch.chdir(tmp_path)
    Path("medusa").write_text("[[0]]", encoding="utf-8")
    assert read_shape(Path("medusa")).num_nodes == 2  # a file of one's own counts for more


def test_a_shape_that_explodes_is_refused_at_once() -> None:
    with pytest.raises(EdgespecError, match="768"):
        expansion((100, 100, 100))
