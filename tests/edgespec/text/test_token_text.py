"""Tokens become text one by one, in whole characters, and no order of them fails: it is the tokenizer's own text."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PreTrainedTokenizerBase

from edgespec import Engine, TreeSettings
from edgespec.text.stops import StopStrings, TextPieces
from edgespec.text.token_text import CUT_CHARACTER, MAX_WAITING, TokenText, text_of_tokens
from edgespec.tuning.step import StepResult
from tests.support.families import GROUPED, make_model, save_folder
from tests.support.tokenizer_kinds import KINDS, whole_text

TOKENIZERS = {kind: make() for kind, make in KINDS.items()}
BYTE_LEVEL, WITH_BYTES, PLAIN = (
    TOKENIZERS[kind]
    for kind in ("byte-level BPE (GPT-2, Llama 3, Qwen)", "BPE with bytes (Llama 2, Mistral)", "WordLevel, no decoder")
)
STOPS = ("a", "\n", ".", "é", "b b", "😀")


def ids_of(tokenizer: PreTrainedTokenizerBase, tokens: str) -> list[int]:
    """The ids of tokens that are written with spaces between them."""
    vocab = tokenizer.get_vocab()
    return [vocab[token] for token in tokens.split()]


def random_ids(tokenizer: PreTrainedTokenizerBase, *, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Ids of a few tokens, so that they meet, and of any, also of none."""
    few, every = st.integers(0, 52), st.integers(-2, len(tokenizer) + 2)
    added = st.integers(len(tokenizer) - 5, len(tokenizer) - 1)
    return st.lists(few | every | added, max_size=max_size)


@pytest.mark.parametrize("keeps_special", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_come_and_the_rest_are_the_tokenizers_text_at_every_token(kind: str, keeps_special: bool) -> None:
    tokenizer = TOKENIZERS[kind]

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(ids=random_ids(tokenizer))
    def check(ids: list[int]) -> None:
        text, came = TokenText(tokenizer, keeps_special=keeps_special), ""
        for count, token in enumerate(ids, 1):
            came += text.step(token)
            assert came + text.rest() == whole_text(tokenizer, ids[:count], keeps_special=keeps_special)

    check()


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "pieces", "rest"),
    [
        (BYTE_LEVEL, "a ð Ł ĺ Ģ a", ["a", "", "", "", "😀", "a"], ""),
        (BYTE_LEVEL, "ð Ł a ðŁĺ", ["", "", "\ufffda", ""], "\ufffd"),
        (WITH_BYTES, "a <0xC3> <0xA9> a", ["a", "", "", "éa"], ""),
        # A bad byte makes its whole run unreadable, as when the tokenizer decodes it
        (WITH_BYTES, "a <0xC3> <0xA9> <0xC3> a", ["a", "", "", "", "\ufffd\ufffd\ufffda"], ""),
        (WITH_BYTES, "▁a <0xC3> <0xA9>", ["a", "", ""], "é"),
    ],
)
def test_pieces_are_whole_characters(
    tokenizer: PreTrainedTokenizerBase, tokens: str, pieces: list[str], rest: str
) -> None:
    text = TokenText(tokenizer)
    assert [text.step(token) for token in ids_of(tokenizer, tokens)] == pieces
    assert text.rest() == rest


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [(WITH_BYTES, "<0x0A>"), (WITH_BYTES, "<0xF0> <0x9F> <0x98> <0x80>"), (BYTE_LEVEL, "ð"), (BYTE_LEVEL, "Ģ ð")],
)
def test_a_long_run_of_bytes_is_read_in_parts(tokenizer: PreTrainedTokenizerBase, tokens: str) -> None:
    ids = ids_of(tokenizer, tokens)
    ids = (ids * (5 * MAX_WAITING))[: 5 * MAX_WAITING]
    text, came = TokenText(tokenizer), ""
    for count, token in enumerate(ids, 1):
        came += text.step(token)
        assert len(text_of_tokens(tokenizer, ids[:count])) - len(came) <= MAX_WAITING
    assert came + text.rest() == whole_text(tokenizer, ids)


def test_tokens_that_end_a_text_leave_none() -> None:
    (a, b) = ids_of(PLAIN, "a b")
    assert text_of_tokens(PLAIN, [b, a, b], without=frozenset({a})) == "b b"


def streamed(tokenizer: PreTrainedTokenizerBase, bursts: list[list[int]], *stop: str) -> tuple[str, int]:
    """The text that comes of bursts of tokens up to a stop string, and how many tokens it took."""
    text = TokenText(tokenizer)
    pieces = TextPieces(decode=text.step, rest=text.rest, stop=StopStrings(strings=stop))
    came, count = "", 0
    for index, burst in enumerate(bursts):
        step = StepResult(
            tokens=tuple(burst), finish="length" if index == len(bursts) - 1 else None,
            num_drafted=0, is_prefill=False, grow_s=0.0, target_s=0.0, rest_s=0.0,
        )  # fmt: skip
        chunk = pieces.chunk(step)
        came, count = came + chunk.text, count + len(chunk.step.tokens)
        if chunk.step.finish:
            break
    return came, count


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WITH_BYTES, TOKENIZERS["Unigram, Metaspace, spaces cleaned"]])
def test_a_text_ends_with_the_first_token_that_completes_a_stop_string(tokenizer: PreTrainedTokenizerBase) -> None:
    """The reference decodes every beginning of the text; a part of a character at its end counts for nothing."""

    @settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(
        bursts=st.lists(random_ids(tokenizer, max_size=6), min_size=1, max_size=6),
        stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=2),
    )
    def check(bursts: list[list[int]], stop: list[str]) -> None:
        ids = [token for burst in bursts for token in burst]
        beginnings = [(whole_text(tokenizer, ids[:count]), count) for count in range(1, len(ids) + 1)]
        expected = next(
            (
                (text[: min(text.find(string) for string in stop if string in text)], count)
                for text, count in beginnings
                if any(string in text.rstrip(CUT_CHARACTER) for string in stop)
            ),
            (whole_text(tokenizer, ids), len(ids)),
        )
        assert streamed(tokenizer, bursts, *stop) == expected
        assert streamed(tokenizer, bursts, "never") == streamed(tokenizer, bursts)

    check()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model whose tokens are mostly bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    config = LlamaConfig(**{**GROUPED, "vocab_size": len(WITH_BYTES)}, tie_word_embeddings=True)
    save_folder(folder, make_model(config), tokenizer=WITH_BYTES)
    return Engine.from_pretrained(folder, device="cpu", tree=TreeSettings(policy="none"), self_check=False)


OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0}
CUT: dict[str, Any] = {"max_new_tokens": 8, "logit_bias": dict.fromkeys(ids_of(WITH_BYTES, "<0xC3>"), 100)}


def test_texts_of_bytes_end_whole_alone_and_together(engine: Engine) -> None:
    alone = [engine.generate("ab", seed=seed, name="same", **OPTIONS) for seed in range(3)]
    requests = [engine.request("ab", seed=seed, name="same", **OPTIONS) for seed in range(3)]
    together = dict(engine.generate_many(requests))
    for index, text in enumerate(alone):
        spelled = [token for token in text.token_ids if token not in engine.pair.stop_tokens]
        assert text.text == whole_text(WITH_BYTES, spelled)
        assert getattr(together[index], "text", together[index]) == text.text


def test_a_stop_string_that_never_comes_changes_no_text(engine: Engine) -> None:
    texts = [engine.generate("ab", stop=stop, **CUT).text for stop in ([], "never")]
    assert texts == [CUT_CHARACTER * CUT["max_new_tokens"]] * 2


def test_an_interrupted_text_shows_what_was_held_back(engine: Engine) -> None:
    handle = engine.submit(engine.request("ab", stop="never", **CUT))
    chunks = iter(handle)
    assert next(chunks).text == ""
    chunks.close()
    text = handle.whole()
    assert (text.finish_reason, text.text) == ("interrupted", whole_text(WITH_BYTES, list(text.token_ids)))


def test_a_part_of_a_character_is_no_part_of_the_answer_that_is_read_again(engine: Engine, tmp_path: Path) -> None:
    chat = engine.chat(**CUT)
    answer = chat.send("ab")
    message = chat.messages[-1]
    assert (message.content, message.token_ids) == ("", answer.token_ids)
    chat.save(tmp_path / "session.json")
    chat.load(tmp_path / "session.json")
    assert chat.messages[-1] == message
