"""The loop of a chat, and the single turn of a pipe."""

from __future__ import annotations

import functools
from collections.abc import Callable

from edgespec.cli import EXIT_INTERRUPTED
from edgespec.cli.chat.actions import perform
from edgespec.cli.chat.answers import answer
from edgespec.cli.chat.spoken import understand, without_quotes
from edgespec.cli.chat.state import Chat
from edgespec.cli.console import print_error
from edgespec.cli.spelling import spelled
from edgespec.errors import EXIT_RUNTIME, EdgespecError

PROMPT = "> "
HINT = "Use Ctrl-D or /exit to leave."


def converse(chat: Chat, first: str | None) -> int:
    """Answer `first`, then read and answer until somebody leaves; return the exit status."""
    assert chat.reader is not None
    if first is not None:
        _try(lambda: say(chat, first))
    while not chat.is_over:
        try:
            typed = chat.reader.read(PROMPT)
        except EOFError:
            break
        except KeyboardInterrupt:
            chat.screen.say(HINT)
            continue
        try:
            _try(functools.partial(react, chat, typed))
        except (KeyboardInterrupt, EOFError):  # while a command asked for text
            chat.screen.say("left as it was")
    return 0


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except EdgespecError as error:
        print_error(spelled(error.what), spelled(error.fix))


def react(chat: Chat, typed: str) -> None:
    """Do what a line asks for; raises EdgespecError."""
    spoken = understand(typed)
    if spoken.command is not None:
        perform(chat, spoken.command, spoken.text)
        return
    text = without_quotes(spoken.text)
    if text.strip() or (chat.attachments and not text):
        say(chat, text)


def say(chat: Chat, text: str) -> bool:
    """Send a message with what is attached to it, and return whether there was an answer."""
    message = chat.with_attachments(text)
    answered = answer(chat, lambda on_prefill: chat.conversation.stream(message, on_prefill=on_prefill))
    if answered:
        chat.attachments.clear()
    return answered


def single_turn(chat: Chat, text: str) -> int:
    """Answer one message and return the exit status. Raises EdgespecError."""
    answered = say(chat, text)
    last = chat.conversation.last
    if last is not None and last.finish_reason == "interrupted":
        return EXIT_INTERRUPTED
    return 0 if answered else EXIT_RUNTIME
