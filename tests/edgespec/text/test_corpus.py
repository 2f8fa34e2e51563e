"""Files that texts may be continued by: what is read, what is refused, and that no text changes."""

from pathlib import Path

import pytest

from edgespec import EdgespecError, Engine, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER, open_tokenizer
from edgespec.text.corpus import MOST_FILE_BYTES, read_corpus

CODE = "def total(values):\n    return sum(values)\n"


def test_a_folders_texts_are_read_and_data_and_hidden_files_left_out(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(DEMO_FOLDER / "target")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "total.py").write_text(CODE)
    alone = read_corpus([tmp_path / "code"], tokenizer)
    (tmp_path / "code" / "data.bin").write_bytes(b"\xff\xfe\x00\x80")
    (tmp_path / "code" / ".hidden").write_text("other text")
    large = tmp_path / "code" / "large.txt"
    with large.open("wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)
    found = read_corpus([tmp_path], tokenizer)
    assert found.num_tokens == alone.num_tokens > 0
    assert (found.files_left_out, alone.files_left_out) == ([tmp_path / "code" / "data.bin", large], [])
    assert read_corpus([tmp_path / "code" / "total.py"], tokenizer).num_tokens == alone.num_tokens


@pytest.mark.parametrize(("name", "words"), [("nowhere", "cannot be read"), ("data.bin", "no text in UTF-8")])
def test_a_file_that_is_named_is_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(EdgespecError, match=words) as caught:
        read_corpus([tmp_path / name], open_tokenizer(DEMO_FOLDER / "target"))
    assert name in caught.value.what


def test_a_corpus_brings_tokens_and_changes_no_text(tmp_path: Path) -> None:
    (tmp_path / "said.txt").write_text(CODE)
    target = DEMO_FOLDER / "target"
    with Engine.from_pretrained(target, draft="none", context_tokens=96) as engine:
        with engine.trees.held_to(TreeSettings(policy="none", lookup=False)):
            plain = engine.generate("def total(", max_new_tokens=24, temperature=0)
        (tmp_path / "said.txt").write_text("def total(" + plain.text)
        engine.trees.use_corpus(tmp_path)
        with engine.trees.held_to(TreeSettings(policy="lookup", size=8)):
            found = engine.generate("def total(", max_new_tokens=24, temperature=0)
    assert found.token_ids == plain.token_ids
    assert sum(step.num_looked_up for step in found.steps) > 8
