"""Inputs that were changed at random are read or refused; what is anything else is seen, and can be made again."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec import EdgespecError
from tests.fuzz.changes import changed_json
from tests.fuzz.mutated_inputs import Input, files_of_ours, model_folders, prompt_files
from tests.fuzz.mutations import check


@pytest.mark.parametrize(
    ("make", "number"),
    [(model_folders, 26), (prompt_files, 200), (files_of_ours, 100)],
    ids=["folders", "rows", "files of ours"],
)
def test_nothing_unexpected_becomes_of_a_few(make: Callable[[Path], list[Input]], number: int, tmp_path: Path) -> None:
    counts = check("few", make, tmp_path, number, seed=7)
    assert not counts.unexpected
    assert counts.read + counts.refused.total() == number
    assert counts.read
    assert counts.refused


def test_each_outcome_is_counted_and_a_seed_says_which_change_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "valid"
    folder.mkdir()
    (folder / "a.json").write_text('{"a": [1, 2, 3], "b": "text"}')
    seen = []

    def read(place: Path, _chance: random.Random) -> None:
        content = (place / "a.json").read_bytes() if (place / "a.json").is_file() else b""
        seen.append(content)
        if len(seen) % 3 == 1:
            raise EdgespecError("E_SETTING", "x", "y")
        if len(seen) % 3 == 2:
            raise KeyError("a")

    def make(_root: Path) -> list[Input]:
        return [Input(name="one", folder=folder, changes={"a.json": changed_json}, read=read)]

    counts = check("k", make, tmp_path, 30, seed=1)
    assert (counts.read, counts.refused.total(), counts.unexpected.total()) == (10, 10, 10)
    first = list(seen)
    check("k", make, tmp_path, 30, seed=1)
    assert seen[30:] == first
    assert len(set(first)) > 15
    assert json.loads((folder / "a.json").read_text()) == {"a": [1, 2, 3], "b": "text"}
