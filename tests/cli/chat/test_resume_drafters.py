"""`edgespec chat --resume` with an EAGLE-3 head and with a DFlash2 drafter says what one chat in one go says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.chat.test_terminal import Terminal
from tests.cli.generate.test_resume_drafters import options_of

MESSAGES = ["def main(", "import re"]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("draft", ["DFlash2", "EAGLE-3"])
def test_a_chat_that_is_gone_on_with_is_the_one_held_in_one_go(draft: str, temperature: str, tmp_path: Path) -> None:
    command = ["-m", "edgespec", "chat", *options_of(draft, temperature, tmp_path)]

    def talk(home: Path, *messages: str, resumes: bool = False) -> list[dict[str, str]]:
        terminal = Terminal([*command, *(["--resume"] if resumes else [])], home)
        assert ("loaded 1 turn," in terminal.ready()) == resumes
        for message in messages:
            terminal.line(message)
        terminal.keys("/bye\r")
        assert terminal.end() == 0
        (file,) = (home / "sessions/recent").glob("*.json")
        found: list[dict[str, str]] = json.loads(file.read_text(encoding="utf-8"))["messages"]
        return found

    for name in ("one go", "in turn"):
        (tmp_path / name).mkdir()
    whole = talk(tmp_path / "one go", *MESSAGES)
    assert [one["content"] for one in whole if one["role"] == "user"] == MESSAGES
    before = talk(tmp_path / "in turn", MESSAGES[0])
    assert talk(tmp_path / "in turn", MESSAGES[1], resumes=True) == whole
    assert whole[: len(before)] == before
