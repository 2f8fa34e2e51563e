"""The loop of a chat, and the single turn of a pipe."""

import contextlib
import functools
import sys
from collections.abc import Callable

from edgespec.cli.chat.actions import attach_pasted, handle_command, new_session
from edgespec.cli.chat.answers import answer, give_result
from edgespec.cli.chat.parse import parse, without_quotes
from edgespec.cli.chat.recent import save_recent
from edgespec.cli.chat.settings import saved_settings
from edgespec.cli.chat.state import Chat
from edgespec.cli.console import print_error
from edgespec.cli.ctrl_c import EXIT_INTERRUPTED
from edgespec.cli.faults import as_edgespec_error, is_debugged, show_trace
from edgespec.cli.standard_streams import StdoutError
from edgespec.errors import EXIT_RUNTIME, EdgespecError

PROMPT = "> "
HINT = "Use Ctrl-D or /exit to leave."


def converse(chat: Chat, first: str | None) -> int:
    """Answer `first`, then read and answer until the user leaves; return the exit status.

    An error is shown and ends nothing; what ends the program in another way leaves the conversation in a file.
    """
    try:
        return _converse(chat, first)
    except BaseException:
        _keep(chat)
        raise


def _converse(chat: Chat, first: str | None) -> int:
    if first is not None:
        _try(chat, lambda: say(chat, first))
        save_recent(chat)
    while not chat.is_over:
        try:
            typed = chat.read(_prompt(chat))
        except EOFError:
            break
        except KeyboardInterrupt:
            chat.screen.say(HINT)
            continue
        try:
            _try(chat, functools.partial(handle, chat, typed))
        except (KeyboardInterrupt, EOFError):  # while a command read text
            chat.screen.say("left as it was")
        save_recent(chat)
    return 0


def _try(chat: Chat, act: Callable[[], object]) -> None:
    try:
        act()
    except (StdoutError, BrokenPipeError):  # answers cannot be seen any more
        raise
    except Exception as error:
        shown_error = as_edgespec_error(error)
        print_error(shown_error.what, shown_error.fix)
        if not isinstance(error, EdgespecError):
            show_trace(debug=is_debugged(sys.argv[1:]))
            _keep(chat)
            chat.engine.forget()  # the fault may have left the last text's rows half done


def _keep(chat: Chat) -> None:
    """Save the conversation of a fault, if there is any, and say where."""
    with contextlib.suppress(Exception):  # no fault of its own may take the place of the first
        if chat.conversation.num_turns:
            chat.kept = chat.kept or new_session()
            chat.conversation.save(chat.kept, overwrite=True, settings=saved_settings(chat))
            chat.screen.say(f"the conversation is kept: /load {chat.kept}")


def handle(chat: Chat, typed: str) -> None:
    """Run a typed command, or send a message; raises EdgespecError."""
    rest = attach_pasted(chat, typed)  # first: a path begins as a command does
    line = parse(typed) if rest == typed else None
    if line is not None and line.command is not None:
        handle_command(chat, line.command, line.text)
        return
    text = without_quotes(rest if line is None else line.text)
    if text.strip() or (chat.attachments and not text):
        (give_result if chat.conversation.pending_calls else say)(chat, text)


def _prompt(chat: Chat) -> str:
    """Return what stands before the cursor: whose result is asked for, where a call waits for one."""
    calls = chat.conversation.pending_calls
    return f"result of {calls[0]['function']['name']}{PROMPT}" if calls else PROMPT


def say(chat: Chat, text: str) -> bool:
    """Send a message with what is attached to it, and return whether there was an answer."""
    message = chat.with_attachments(text)
    stream, images = chat.conversation.stream, chat.pictures
    answered = answer(chat, lambda on_prefill: stream(message, images=images, on_prefill=on_prefill))
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
