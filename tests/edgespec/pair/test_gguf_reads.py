"""A start reads a GGUF file's header and vocabulary once, and again where the file has changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import EdgespecError
from edgespec.pair.folder import open_model
from edgespec.pair.pair import open_pair
from offload.gguf import header as headers
from offload.gguf.header import TextList
from offload.gguf.vocabulary import read_vocabulary

TINY = Path(__file__).parents[2] / "offload/gguf/tiny/gemma3.gguf"


def test_a_pair_reads_header_and_vocabulary_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(shutil.copy(TINY, tmp_path))
    read: list[Any] = []

    def counting(function: Any, name: str) -> Any:
        def counted(*arguments: Any) -> Any:
            read.append((name, getattr(arguments[0], "count", None)))
            return function(*arguments)

        return counted

    monkeypatch.setattr(headers, "_read_part", counting(headers._read_part, "header"))
    monkeypatch.setattr(TextList, "read", counting(TextList.read, "texts"))
    open_pair(file, None)
    assert len(read) == len(set(read))
    assert [name for name, _ in read].count("header") == 1
    assert ("texts", len(open_pair(file, None).tokenizer)) in read
    assert read_vocabulary.cache_info().currsize == 0  # it is not kept beside the model


def test_a_file_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    file = Path(shutil.copy(TINY, tmp_path))
    open_model(file)
    os.truncate(file, file.stat().st_size - 64)
    with pytest.raises(EdgespecError, match="truncated") as caught:
        open_model(file)
    assert caught.value.code == "E_SHARD_TRUNCATED"
    other = TINY.with_name("qwen3.gguf")
    shutil.copy(other, file)
    assert open_model(file).config.model_type == open_model(other).config.model_type == "qwen3"
