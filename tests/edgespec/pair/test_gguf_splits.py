"""Every way to split texts gives llama.cpp's ids, with a vocabulary whose tokens lie across all borders.

`scripts/check/gguf_tokenizers.py` recorded the ids.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.pair.gguf_splits import SPLITS
from edgespec.pair.gguf_tokenizer import open_gguf_tokenizer
from tests.offload.gguf.files import write_gguf

RECORDED = json.loads(Path(__file__).with_name("gguf_splits.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("names", RECORDED["ids"], ids=lambda names: names.split()[0])
def test_ids_are_those_of_llama_cpp(names: str, tmp_path: Path) -> None:
    for name in names.split():
        path = write_gguf(tmp_path / "a.gguf", {**RECORDED["settings"], "tokenizer.ggml.pre": name}, [])
        tokenizer = open_gguf_tokenizer(path)
        assert [tokenizer(text)["input_ids"] for text in RECORDED["texts"]] == RECORDED["ids"][names]


def test_all_ways_are_recorded() -> None:
    assert SPLITS.keys() == set(" ".join(RECORDED["ids"]).split())


@pytest.mark.parametrize("name", ["llama-bpe", "tekken", "glm4", "youtu", "minicpm5"])
def test_a_word_that_is_a_token_is_kept_whole(name: str, tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    settings = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": ["b c"], "token_type": [1] * 6}
    whole = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    assert open_gguf_tokenizer(write_gguf(tmp_path / "a.gguf", whole, []))("abc")["input_ids"] == [5]
    other = {**whole, "tokenizer.ggml.pre": "qwen2"}
    assert open_gguf_tokenizer(write_gguf(tmp_path / "b.gguf", other, []))("abc")["input_ids"] == [0, 4]
