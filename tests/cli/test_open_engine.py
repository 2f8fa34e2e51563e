"""What is said of a pair that is set up: trees that texts depend on do not follow what pays."""

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import Engine
from edgespec.cli.console import Console
from edgespec.cli.open_engine import corpus_tokens, trees_in_words, use_corpus
from edgespec.cli.options.engine import OWN_TEXTS
from edgespec.draft.lookup import MOST_CORPUS_TOKENS
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


def test_files_that_a_corpus_leaves_out_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "said.txt").write_text("def total(values):\n")
    for number in range(5):
        (tmp_path / f"data{number}.bin").write_bytes(b"\xff\xfe\x00\x80")
    with Engine.from_pretrained(context_tokens=64, tree=TreeSettings(size=2), self_check=False) as engine:
        use_corpus(Console(quiet=False, verbose=False), engine, [str(tmp_path)])
    said = capsys.readouterr().err
    assert (
        said.count("5 files (data0.bin, data1.bin, data2.bin, …) left out: no text in UTF-8, or more than 4 MiB") == 1
    )
    assert corpus_tokens([str(tmp_path)]) == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert corpus_tokens([OWN_TEXTS]) == MOST_CORPUS_TOKENS
