"""Inputs that were changed at random are read or refused; what is anything else is seen, and can be made again."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
