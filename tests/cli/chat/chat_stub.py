"""A chat whose model repeats what it is told, to test the terminal: `python -m tests.cli.chat.chat_stub HISTORY`."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edgespec.cli.chat.keys import silent_keys
from edgespec.cli.chat.line_editor import open_reader
from edgespec.cli.chat.loop import converse
from edgespec.cli.chat.screen import Screen
from edgespec.cli.chat.state import Chat
from edgespec.cli.console import Console
from edgespec.cli.standard_streams import visible_streams


class StubEngine:
    """Remembers how it was cancelled."""

    tree = largest_tree = SimpleNamespace(policy="none")
    is_tuned = False
    is_stopping = is_abandoning = False

    def cancel(self, *, abandon: bool = False) -> None:
        self.is_stopping = True
        self.is_abandoning |= abandon


class StubConversation:
    """Answers with what was said; `slow` until it is stopped, `deep` until it is abandoned, `stuck` for ever.

    What follows `say ` is the answer, with its escapes.
    """

    is_raw = True
    reader, pending_calls = None, ()

    def __init__(self, engine: StubEngine) -> None:
        self.engine, self.last, self.system = engine, None, None

    def stream(self, text: str, *, images: Any = (), on_prefill: Any = None) -> Iterator[Any]:
        self.engine.is_stopping = self.engine.is_abandoning = False
        self.last = SimpleNamespace(steps=[1], finish_reason="stop")
        if text in {"short", "slow", "deep", "stuck"}:
            flag = {"short": "never", "slow": "is_stopping", "deep": "is_abandoning", "stuck": "never"}[text]
            most = 25 if text == "short" else 10_000
            while not getattr(self.engine, flag, False) and (most := most - 1):
                yield SimpleNamespace(text="tick ")
                time.sleep(0.02)
            yield SimpleNamespace(text=f"ended {text}")
        elif text.startswith("say "):
            yield SimpleNamespace(text=text[4:].encode("latin-1").decode("unicode-escape"))
        else:
            yield SimpleNamespace(text=f"GOT {text!r}")


if __name__ == "__main__":
    engine: Any = StubEngine()
    conversation: Any = StubConversation(engine)
    with visible_streams(), silent_keys() as keys:
        time.sleep(float(os.environ.get("STUB_LOADS_S", "0")))
        read_message, _ = open_reader(
            history=Path(sys.argv[1]), words={"read": (), "show": ("memory",)}, file_commands=("read",), color=False,
            typed=keys.typed,
        )  # fmt: skip
        screen = Screen(Console(quiet=False, verbose=False), color="never")
        chat = Chat(engine=engine, conversation=conversation, screen=screen, read_message=read_message, keys=keys,
                    own_tree=engine.tree, shows_stats=False)  # fmt: skip
        sys.exit(converse(chat, None))
