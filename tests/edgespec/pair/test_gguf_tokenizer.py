"""A GGUF file's vocabulary gives the file's own ids, and its ends of a turn end texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.chat.chat_template import template_ids
from edgespec.errors import EdgespecError
from edgespec.pair.gguf_tokenizer import open_gguf_tokenizer
from offload.errors import CheckpointError
from offload.gguf.header import TextList, read_gguf
from offload.gguf.vocabulary import end_tokens
from tests.offload.gguf.files import write_gguf

TINY = Path(__file__).parents[2] / "offload/gguf/tiny/llama.gguf"
NORMAL, CONTROL, USER, BYTE = 1, 3, 4, 6
WORDS = ["Ġ", "t", "h", "e", "1", "2", ".", "th", "the", "Ġthe", "12"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]


def byte_level(path: Path, more: dict[str, Any] | None = None, **changes: Any) -> Path:
    tokens = [*WORDS, "<s>", "<|im_end|>", "<end_of_turn>", "<tool>"]
    settings: dict[str, Any] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": MERGES, "bos_token_id": 11, "eos_token_id": 12,
        "token_type": [*[NORMAL] * len(WORDS), CONTROL, CONTROL, CONTROL, USER], **changes,
    }  # fmt: skip
    every = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    return write_gguf(path / "a.gguf", every | (more or {}), [])


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


MESSAGES = [{"role": "user", "content": "the"}]
SAYS = "{% for message in messages %}{{ message.content }}{% endfor %}"
BEGINS = "{{ bos_token }}"


def chat(path: Path, template: str, **changes: Any) -> list[int]:
    """The ids of a chat with a file that says so of its first token."""
    tokenizer = open_gguf_tokenizer(byte_level(path, **changes))
    tokenizer.chat_template = template
    return template_ids(tokenizer, MESSAGES)


@pytest.mark.parametrize(
    ("changes", "template", "expected"),
    [
        ({"add_bos_token": True}, SAYS, [11, 8]),
        ({"add_bos_token": True}, BEGINS + SAYS, [11, 8]),
        ({"add_bos_token": True}, BEGINS + BEGINS + SAYS, [11, 11, 8]),
        ({"add_bos_token": True}, " " + BEGINS + SAYS, [11, 0, 11, 8]),
        ({"add_bos_token": False}, SAYS, [8]),
        ({"add_bos_token": False}, BEGINS + SAYS, [11, 8]),
        ({}, SAYS, [8]),
        ({}, BEGINS + SAYS, [11, 8]),
        ({"pre": "llama-bpe"}, SAYS, [11, 8]),  # whose texts begin with it where the file says nothing
        ({"pre": "llama-bpe", "add_bos_token": False}, SAYS, [8]),
        ({"add_bos_token": True, "bos_token_id": 99}, SAYS, [8]),  # which is none of the file's
        ({"add_sep_token": True}, SAYS, [8]),  # of pairs of texts, which no prompt is
    ],
)
def test_chats_begin_as_llama_cpp_lets_them_begin(
    tmp_path: Path, changes: dict[str, Any], template: str, expected: list[int]
) -> None:
    assert chat(tmp_path, template, **changes) == expected


def test_a_token_behind_every_text_is_left_out_of_chats_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert chat(tmp_path, SAYS, add_eos_token=True) == [8]
    assert not caplog.messages  # the file has no template, so that nobody chats with it
    open_gguf_tokenizer(byte_level(tmp_path, {"tokenizer.chat_template": SAYS}, add_eos_token=True))
    assert "asks for '<|im_end|>' behind every text (add_eos_token)" in caplog.text


def ends(path: Path, added: dict[str, int], **changes: Any) -> list[str]:
    """The tokens that end texts, with tokens and their types beside those of the small vocabulary."""
    tokens = [*WORDS, "<s>", "<|im_end|>", "<end_of_turn>", "<tool>", *added]
    types = [*[NORMAL] * len(WORDS), CONTROL, CONTROL, CONTROL, USER, *added.values()]
    file = byte_level(path, tokens=tokens, token_type=types, **changes)
    return [tokens[number] for number in end_tokens(read_gguf(file))]


def test_every_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    assert end_tokens(read_gguf(byte_level(tmp_path))) == [12, 13]
    assert end_tokens(read_gguf(byte_level(tmp_path, eot_token_id=3))) == [3, 12, 13]
    assert end_tokens(read_gguf(byte_level(tmp_path, eom_token_id=4, fim_pad_token_id=5))) == [4, 5, 12, 13]
    usual = ["<|im_end|>", "<end_of_turn>"]
    assert ends(tmp_path, {"<|eot_id|>": NORMAL, "[EOT]": USER}) == [*usual, "<|eot_id|>", "[EOT]"]
    assert ends(tmp_path, {"</s>": USER, "<EOT>": NORMAL}) == usual, "as tags of a page they are no ends"
    assert ends(tmp_path, {"</s>": CONTROL}) == [*usual, "</s>"]


def test_what_a_model_goes_on_after_is_no_end(tmp_path: Path) -> None:
    """gpt-oss writes <|end|> behind its thoughts, and Gemma 4 has a </s> that is a tag."""
    usual = ["<|im_end|>", "<end_of_turn>"]
    assert ends(tmp_path, {"<|end|>": CONTROL, "<|return|>": CONTROL}) == [*usual, "<|end|>", "<|return|>"]
    harmony = dict.fromkeys(("<|end|>", "<|return|>", "<|call|>"), CONTROL)
    assert ends(tmp_path, harmony) == [*usual, "<|return|>", "<|call|>"]
    assert ends(tmp_path, dict.fromkeys(("</s>", "<|tool_response>"), CONTROL)) == [*usual, "<|tool_response>"]


def test_an_end_is_found_whole_whatever_its_type(tmp_path: Path) -> None:
    assert ids(byte_level(tmp_path, token_type=[NORMAL] * (len(WORDS) + 4)), "e<|im_end|>e") == [3, 12, 3]


def test_a_vocabulary_that_is_read_otherwise_is_refused(tmp_path: Path) -> None:
    for changes in ({"pre": "default"}, {"model": "bert"}):
        with pytest.raises(EdgespecError, match="which is not read") as caught:
            open_gguf_tokenizer(byte_level(tmp_path, **changes))
        assert caught.value.code == "E_TOKENIZER"
    with pytest.raises(CheckpointError, match="has the token 'the' twice"):
        open_gguf_tokenizer(byte_level(tmp_path, tokens=[*WORDS, "<s>", "the", "a", "b"]))


def test_merges_of_tokens_that_there_are_not_are_left_out(tmp_path: Path) -> None:
    assert ids(byte_level(tmp_path, merges=[*MERGES, "the 1", "x y", "nothing"]), "the12") == [8, 10]


def test_templates_have_their_names(tmp_path: Path) -> None:
    file, key = tmp_path / "a.gguf", "tokenizer.chat_template"
    header = read_gguf(byte_level(tmp_path))
    own = {name: found.read() if isinstance(found, TextList) else found for name, found in header.settings.items()}

    def template(**named: Any) -> Any:
        names = {f"{key}.{name}" if name != "default" else key: text for name, text in named.items()}
        return open_gguf_tokenizer(write_gguf(file, {**own, **names}, [])).chat_template

    assert template() is None
    assert template(default="{{ 1 }}") == "{{ 1 }}"
    both = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert template(**both) == both
    assert template(tool_use="{{ 2 }}") == {"tool_use": "{{ 2 }}"}
    with pytest.raises(CheckpointError, match="a chat template 'rag' that is no text"):
        template(rag=1)


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


def test_a_text_of_pieces_has_ends_where_the_file_asks_for_them(tmp_path: Path) -> None:
    assert ids(pieces(tmp_path, add_eos_token=True), "ab") == [1, 13, 2]
    assert ids(pieces(tmp_path, remove_extra_whitespaces=True), "  a") == [1, 6, 6, 12], (
        "as in llama.cpp, it is of unigrams"
    )


def test_pieces_with_merges_split_at_lines(tmp_path: Path) -> None:
    """As Gemma 4's: bytes for what is no token, a mark for a space, and a token before each text."""
    file = pieces(tmp_path, model="gemma4", merges=["b c", "▁ a", "a bc", "a \n"], add_bos_token=False)
    assert ids(file, "abc é") == [1, 14, 6, 4, 5]
    assert ids(file, "abc a\n") == [1, 14, 12, 3]
    assert open_gguf_tokenizer(file).decode([14, 12, 3, 4, 5]) == "abc a\né"


def test_special_tokens_of_phi_3_take_the_spaces_behind_them(tmp_path: Path) -> None:
    def found(name: str) -> list[int]:
        settings = dict(read_gguf(pieces(tmp_path)).settings)
        whole = {key: one.read() if isinstance(one, TextList) else one for key, one in settings.items()}
        return ids(write_gguf(tmp_path / "b.gguf", {"general.name": name, **whole}, []), "</s>\n ab")

    assert found("Phi 4") == [1, 2, 6, 3, 13]
    assert found("Phi-3 mini") == [1, 2, 13]


def test_the_tiny_file_reads_the_bytes_that_it_was_made_of() -> None:
    tokenizer = open_gguf_tokenizer(TINY)
    text = "the theatre é\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text.encode()) - 5
