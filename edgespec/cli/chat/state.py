"""What a chat in a terminal consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.console import counted
from edgespec.text.token_text import CUT_CHARACTER
from edgespec.user_paths import HALF_CHARACTER

if TYPE_CHECKING:
    from edgespec.chat.chat_template import Message
    from edgespec.chat.conversation import Conversation
    from edgespec.cli.chat.keys import WaitingKeys
    from edgespec.cli.chat.screen import Screen
    from edgespec.engine import Engine
    from edgespec.text.results import GenerationResult
    from edgespec.tree.settings import TreeSettings


# (prompt, text to begin with) -> a message that a person typed; raises as `Chat.read` does
ReadMessage = Callable[[str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file that goes before the next message."""

    path: Path
    text: str = ""
    is_picture: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An answer, and how it was drafted."""

    result: GenerationResult
    spec: str  # off | tree | chain


@dataclass(slots=True, kw_only=True)
class Chat:
    """Everything that commands may look at and change."""

    engine: Engine
    conversation: Conversation
    screen: Screen
    keys: WaitingKeys
    own_tree: TreeSettings  # that the chat began with
    read_message: ReadMessage | None = None  # None: there is no terminal to ask in
    shows_stats: bool = True
    attachments: list[Attachment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    is_over: bool = False
    kept: Path | None = None  # the session that a fault wrote
    is_saved: bool = False  # after each answer
    file: Path | None = None  # that it is saved to
    file_time: int | None = None  # ns, when this chat wrote it
    saved_messages: tuple[Message, ...] = ()

    def read(self, prompt: str, *, default: str = "") -> str:
        """Read what a person types; bytes that are no character become U+FFFD, with a note.

        Raises EOFError at the end, and KeyboardInterrupt for Ctrl-C on an empty line.
        """
        assert self.read_message is not None
        typed, count = HALF_CHARACTER.subn(CUT_CHARACTER, self.read_message(prompt, default))
        if count:
            self.screen.say(f"not UTF-8, and read as {CUT_CHARACTER}: {counted(count, 'byte')} of what was typed")
        return typed

    @property
    def spec(self) -> str:
        """Say how the next answer will be drafted: off, tree or chain."""
        policy = self.engine.tree.policy
        return {"none": "off", "chain": "chain"}.get(policy, "tree")

    @property
    def pictures(self) -> list[Path]:
        """The attached pictures."""
        return [attachment.path for attachment in self.attachments if attachment.is_picture]

    def with_attachments(self, text: str, *more: Attachment) -> str:
        """Return the message as it will be sent, after the attached files."""
        between = "\n" if self.conversation.is_raw else "\n\n"
        texts = [attachment for attachment in (*self.attachments, *more) if not attachment.is_picture]
        parts = [attachment.text.removesuffix("\n") for attachment in texts]
        return between.join([*parts, text] if text else parts)
