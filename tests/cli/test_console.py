"""Messages on a terminal: sentences break between words, and what is to be copied does not break."""

import logging

import pytest

from edgespec.cli import console
from edgespec.cli.console import Console, broken, print_error


def test_lines_that_are_too_long_break_between_words_and_others_stay() -> None:
    text = "short\n  RAM   libraries   0.188 GiB\nits folder is /a/very/long/path/that/stays-in-one-piece indeed"
    assert broken(text, 31).splitlines() == [
        "short",
        "  RAM   libraries   0.188 GiB",
        "its folder is",
        "  /a/very/long/path/that/stays-in-one-piece",
        "  indeed",
    ]
    assert broken("  a table's row", 10) == "  a\n    table's\n    row"
    assert broken("\x1b[2mdim words\x1b[0m", 9) == "\x1b[2mdim words\x1b[0m"  # colours take no columns


def test_a_terminal_gets_whole_words_and_the_log_whole_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(console, "terminal_width", lambda _stream: 20)
    caplog.set_level(logging.INFO)
    command = "to go on: edgespec generate p.jsonl --resume"
    for said, breaks in (("3 prompts · 120 tokens · 9 tok/s", True), (command, False)):
        Console(quiet=False, verbose=False).say(said, breaks=breaks)
    print_error("'nowhere.jsonl' does not exist.", "Name a file; -p TEXT gives a prompt.")
    assert capsys.readouterr().err.splitlines() == [
        "3 prompts · 120",
        "  tokens · 9 tok/s",
        command,
        "Error:",
        "  'nowhere.jsonl'",
        "  does not exist.",
        "Try: Name a file; -p",
        "  TEXT gives a",
        "  prompt.",
    ]
    assert [record.message for record in caplog.records][:2] == ["3 prompts · 120 tokens · 9 tok/s", command]
