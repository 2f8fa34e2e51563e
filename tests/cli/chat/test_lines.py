"""Lines of an answer break at words, whatever its pieces, on a terminal as it draws them."""

import textwrap
from itertools import pairwise

import pyte
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.cli.chat.screen import WordLines


def drawn(pieces: list[str], columns: int, *, rows: int = 60) -> list[str]:
    """The lines of a terminal after these pieces."""
    screen = pyte.Screen(columns, rows)
    stream, lines = pyte.Stream(screen), WordLines()
    for piece in pieces:
        stream.feed(lines.broken(piece, columns).replace("\n", "\r\n"))
    shown = [line.rstrip() for line in screen.display]
    return shown[: max((index + 1 for index, line in enumerate(shown) if line), default=0)]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(ends)]


WORDS = st.lists(st.text("abcdé.", min_size=1, max_size=9), max_size=40).map(" ".join)


@given(WORDS, st.lists(st.integers(0, 400)), st.integers(12, 30))
@example("aaaa bbbb cccc ddddddd", [6, 13, 17], 12)
def test_a_terminal_shows_the_lines_that_a_text_has_when_it_is_known_whole(
    text: str, places: list[int], columns: int
) -> None:
    # The last column stays empty, but for a blank: a terminal waits there
    assert drawn(cut(text, places), columns) == textwrap.wrap(text, columns - 1, break_on_hyphens=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see https://example.org/a/long/path now", ["see", "https://example.org/", "a/long/path now"]),
        ("one two\nthree four five six seven", ["one two", "three four five six", "seven"]),
        ("```\nlong = code(that, stays, here)\n```\nand then words as before", [
            "```", "long = code(that, st", "ays, here)", "```", "and then words as", "before",
        ]),
        ("~~~\n```\ncode of many letters here\n~~~\nwords that are broken", [
            "~~~", "```", "code of many letters", " here", "~~~", "words that are", "broken",
        ]),
        ("    indented = code(that, stays)", ["    indented = code(", "that, stays)"]),
        ("    - an item of a list is broken", ["    - an item of a", "list is broken"]),
        ("| a table | stays a | table |", ["| a table | stays a", "| table |"]),
        ("行の終わりで折り返します。そして次", ["行の終わりで折り返", "します。そして次"]),
        ("abc 東京タワー and more words", ["abc 東京タワー and", "more words"]),
        ("a\tb\tc dddd", ["a       b       c", "dddd"]),
        ("non\xa0breaking\xa0blank here", ["non\xa0breaking\xa0blank", "here"]),
        ("e\u0301" * 10 + " " + "e\u0301" * 12, ["é" * 10, "é" * 12]),
        ("x" * 19 + " y", ["x" * 19, "y"]),
        ("x" * 20 + " y", ["x" * 20, " y"]),
        ("x" * 45 + " yyyyyyyyyyyyyyyy", ["x" * 20, "x" * 20, "x" * 5, "y" * 16]),
    ],
)  # fmt: skip
def test_what_is_left_and_what_is_not(text: str, expected: list[str]) -> None:
    for pieces in ([text], list(text), cut(text, [3, 7, 11, 22])):
        assert drawn(pieces, 20) == expected


def test_nothing_above_the_line_is_drawn_again_and_a_word_is_whole_at_once() -> None:
    lines = WordLines()
    written = [lines.broken(piece, 12) for piece in ("one two", " thr", "ee", " four")]
    assert written == ["one two", " thr", "\x1b[3D\x1b[K\nthree", " four"]


def test_a_window_that_changes_in_a_word_loses_nothing() -> None:
    lines = WordLines()
    written = [lines.broken("one two thr", 40), lines.broken("ee four", 12)]
    assert written == ["one two thr", "\nee four"]  # what may stand in another line is not erased
