"""A chat on the built-in pair, without a terminal."""

from collections.abc import Iterator
from typing import Any

import pytest

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.cli.chat.keys import WaitingKeys
from edgespec.cli.chat.screen import Screen
from edgespec.cli.chat.state import Chat
from edgespec.cli.console import Console


class Lines:
    """Types lines; an exception among them is raised."""

    def __init__(self, lines: list[Any]) -> None:
        self.lines = lines
        self.defaults: list[str] = []

    def __call__(self, _prompt: str, default: str) -> str:
        self.defaults.append(default)
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return str(line)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tree = TreeSettings(size=8)
    with Engine.from_pretrained(tree=tree, dtype="float32", context_tokens=160, self_check=False) as found:
        yield found


def new_chat(engine: Engine) -> Chat:
    engine.forget()
    engine.use_tree(TreeSettings(size=8))
    conversation = engine.chat(sampling=SamplingSettings(), max_new_tokens=6)
    screen = Screen(Console(quiet=False, verbose=False), color="never")
    return Chat(engine=engine, conversation=conversation, keys=WaitingKeys(), own_tree=engine.tree, screen=screen)
