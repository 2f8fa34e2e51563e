"""Stop strings end a text where they begin, however tokens and steps cut it into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import EdgespecError
from edgespec.text.results import TextChunk
from edgespec.text.stops import StopStrings, TextPieces, stop_strings
from edgespec.tuning.step import StepResult
from tests.support.families import make_tokenizer

LETTERS = st.text("ab", max_size=3)


def step(tokens: list[int], *, is_last: bool) -> StepResult:
    return StepResult(
        tokens=tuple(tokens), finish="length" if is_last else None, num_drafted=0, is_prefill=False,
        grow_s=0.0, target_s=0.0, rest_s=0.0,
    )  # fmt: skip


def chunks(pieces: list[list[str]], stop: tuple[str, ...], special: dict[int, str] | None = None) -> list[TextChunk]:
    """Steps of tokens that stand for these pieces of text, each token's id its place."""
    texts = [text for burst in pieces for text in burst]
    numbered, steps = iter(range(len(texts))), []
    for index, burst in enumerate(pieces):
        steps.append(step([next(numbered) for _ in burst], is_last=index == len(pieces) - 1))
    wanted = StopStrings(strings=stop, special_tokens=special or {})
    made = TextPieces(decode=lambda token: texts[token], rest=str, stop=wanted)
    found: list[TextChunk] = []
    for one in steps:
        found.append(made.chunk(one))
        if found[-1].step.finish is not None:
            break
    return found


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.lists(LETTERS, min_size=1, max_size=4), min_size=1, max_size=5),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_and_tokens_are_those_of_a_search_through_the_whole_text(pieces: list[list[str]], stop: list[str]) -> None:
    """The reference looks at every prefix of tokens: the first that holds a stop string ends the text."""
    texts = [text for burst in pieces for text in burst]
    whole, count, stopped = "".join(texts), len(texts), False
    for end in range(1, len(texts) + 1):
        before = "".join(texts[:end])
        starts = [before.find(string) for string in stop if string in before]
        if starts:
            whole, count, stopped = before[: min(starts)], end, True
            break
    found = chunks(pieces, tuple(stop))
    assert "".join(chunk.text for chunk in found) == whole
    assert sum(len(chunk.step.tokens) for chunk in found) == count
    assert found[-1].step.finish == ("stop" if stopped else "length")
    before = "".join(texts[:count])
    matches = [string for string in stop if before.find(string) == len(whole)] if stopped else []
    assert found[-1].stop_string == min(matches, key=len, default=None)
    assert all(chunk.stop_string is None for chunk in found[:-1])


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    shown = [chunk.text for chunk in chunks([["one E"], ["N"], ["d of EN"], ["D two"]], ("END",))]
    assert shown == ["one ", "", "ENd of ", ""]


def test_held_text_is_shown_when_the_text_ends_otherwise() -> None:
    assert [chunk.text for chunk in chunks([["a\n"], ["b\n"]], ("\n\n",))] == ["a", "\nb\n"]


def test_tokens_behind_the_stop_string_in_the_same_burst_are_dropped() -> None:
    (only,) = chunks([["a", "EN", "D", "b", "c"]], ("END",))
    assert (only.text, only.step.tokens, only.step.finish) == ("a", (0, 1, 2), "stop")


def test_a_special_token_ends_a_text_though_it_leaves_none() -> None:
    tokenizer = make_tokenizer()
    assert stop_strings(tokenizer, "<|endoftext|>").special_tokens == {tokenizer.eos_token_id: "<|endoftext|>"}
    assert stop_strings(tokenizer, ["x"]).special_tokens == {}
    (only,) = chunks([["a", "", "b"]], ("<|endoftext|>",), special={1: "<|endoftext|>"})
    assert (only.text, only.step.tokens, only.stop_string) == ("a", (0, 1), "<|endoftext|>")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(EdgespecError, match="empty"):
        stop_strings(make_tokenizer(), ["x", ""])
