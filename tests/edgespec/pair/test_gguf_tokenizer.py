"""A GGUF file's vocabulary gives the file's own ids, and its ends of a turn end texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import EdgespecError
from edgespec.pair.gguf_tokenizer import open_gguf_tokenizer
from offload.gguf.header import read_gguf
from offload.gguf.vocabulary import end_tokens
from tests.offload.gguf.files import write_gguf

TINY = Path(__file__).parents[2] / "offload/gguf/tiny/llama.gguf"
NORMAL, CONTROL, USER, BYTE = 1, 3, 4, 6
WORDS = ["Ġ", "t", "h", "e", "1", "2", ".", "th", "the", "Ġthe", "12"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]


def byte_level(path: Path, **changes: Any) -> Path:
    tokens = [*WORDS, "<s>", "<|im_end|>", "<end_of_turn>", "<tool>"]
    settings: dict[str, Any] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": MERGES, "bos_token_id": 11, "eos_token_id": 12,
        "token_type": [*[NORMAL] * len(WORDS), CONTROL, CONTROL, CONTROL, USER], **changes,
    }  # fmt: skip
    return write_gguf(path / "a.gguf", {f"tokenizer.ggml.{key}": value for key, value in settings.items()}, [])


def ids(path: Path, text: str) -> list[int]:
    return open_gguf_tokenizer(path)(text)["input_ids"]


def test_texts_are_split_as_the_file_says(tmp_path: Path) -> None:
    assert ids(byte_level(tmp_path), "the the12.") == [8, 9, 10, 6]
    for pre in ("qwen2", "smollm"):  # which split numbers into digits
        assert ids(byte_level(tmp_path, pre=pre), "the the12.") == [8, 9, 4, 5, 6]
    assert ids(byte_level(tmp_path), "e<|im_end|>e<tool>") == [3, 12, 3, 14]


def test_a_file_says_whether_texts_begin_with_a_token(tmp_path: Path) -> None:
    assert ids(byte_level(tmp_path), "the") == [8]
    assert ids(byte_level(tmp_path, add_bos_token=True), "the") == [11, 8]
    assert ids(byte_level(tmp_path, pre="llama-bpe"), "the") == [11, 8]
    assert ids(byte_level(tmp_path, pre="llama-bpe", add_bos_token=False), "the") == [8]
    assert ids(byte_level(tmp_path, add_bos_token=True, add_eos_token=True), "the") == [11, 8, 12]


def test_every_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    assert end_tokens(read_gguf(byte_level(tmp_path))) == [12, 13]
    assert end_tokens(read_gguf(byte_level(tmp_path, eot_token_id=3))) == [3, 12, 13]
    plain = [NORMAL] * (len(WORDS) + 4)
    assert end_tokens(read_gguf(byte_level(tmp_path, token_type=plain))) == [12]


def test_a_vocabulary_that_is_split_otherwise_is_refused(tmp_path: Path) -> None:
    for changes in ({"pre": "falcon"}, {"model": "bert"}):
        with pytest.raises(EdgespecError, match="which is not read") as caught:
            open_gguf_tokenizer(byte_level(tmp_path, **changes))
        assert caught.value.code == "E_TOKENIZER"


def pieces(path: Path, **changes: Any) -> Path:
    """SentencePiece's tokens: what has the higher score is merged first."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc"]
    scores = [0.0] * 10 + [-3.0, -1.0, -2.0, -4.0, -5.0]
    types = [2, CONTROL, CONTROL, BYTE, BYTE, BYTE, *[NORMAL] * 9]
    settings: dict[str, Any] = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0, **changes,
    }  # fmt: skip
    return write_gguf(path / "a.gguf", {f"tokenizer.ggml.{key}": value for key, value in settings.items()}, [])


def test_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    assert ids(pieces(tmp_path), "abc") == [1, 12, 11]  # "▁a" "bc": "bc" comes before "ab"
    assert ids(pieces(tmp_path, add_space_prefix=False), "abc") == [1, 14]
    assert ids(pieces(tmp_path, add_bos_token=False), "ab") == [13]
    assert ids(pieces(tmp_path), "é\n") == [1, 6, 4, 5, 3]
    assert open_gguf_tokenizer(pieces(tmp_path)).decode([12, 11, 6, 4, 5]) == "abc é"


def test_the_tiny_file_reads_the_bytes_that_it_was_made_of() -> None:
    tokenizer = open_gguf_tokenizer(TINY)
    text = "the theatre é\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text.encode()) - 5
