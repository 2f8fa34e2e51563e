"""Typing messages: a line editor where there is a terminal for it, plain lines where there is none."""

import io
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.output import ColorDepth, create_output

from edgespec.cli.chat.parse import continues, wants_more
from edgespec.cli.chat.state import ReadMessage
from edgespec.cli.console import draws_lines
from edgespec.cli.standard_streams import drawing_stream
from edgespec.user_paths import PRIVATE_FILE, has_place, make_folder, shown_place

COMPLETIONS = dict[str, tuple[str, ...]]


def open_reader(
    *, history: Path | None, words: COMPLETIONS, file_commands: Iterable[str], color: bool, typed: bytes = b""
) -> tuple[ReadMessage, str | None]:
    """Return what reads messages, and what is wrong with the history file, if anything is.

    `words` are what may follow a command; after `file_commands` come paths. `typed` was typed before.
    """
    if not draws_lines():
        return _plain_reader(), None
    screen = sys.stdout if sys.stdout.isatty() else sys.stderr
    kept, problem = _history(history)
    try:
        session: PromptSession[str] = PromptSession(
            history=kept,
            completer=_Completer(words, frozenset(file_commands)),
            complete_while_typing=False,
            multiline=True,
            key_bindings=_keys(),
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            prompt_continuation="",
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            output=create_output(stdout=drawing_stream(screen)),
        )
    except Exception:  # a Windows console that is none, as in Git Bash, and whatever other terminals may lack
        return _plain_reader(), problem
    early: list[KeyPress] = []
    parser = Vt100Parser(early.append)
    parser.feed_and_flush(typed.decode(errors="surrogateescape"))
    store_typeahead(session.input, early)
    return lambda prompt, default: session.prompt(prompt, default=default), problem


def _plain_reader() -> ReadMessage:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # or bytes that are not UTF-8 would be an error each
    return _read_plain_lines


def _read_plain_lines(prompt: str, _default: str) -> str:
    """Read a message as lines; blocks in quotes and backslashes at a line's end work here too."""
    typed = _line(prompt)
    while continues(typed) or wants_more(typed):
        typed = f"{typed[:-1] if continues(typed) else typed}\n{_line('')}"
    return typed


def _line(prompt: str) -> str:
    """Read a line; the prompt goes to stderr, because stdout has answers alone."""
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _history(path: Path | None) -> tuple[History, str | None]:
    if path is None:
        return InMemoryHistory(), None
    if not has_place(path):
        return InMemoryHistory(), f"no history: it would be {shown_place(path)}"
    try:
        make_folder(path.parent)
        # Only the user may read it, also where another program made it.
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, PRIVATE_FILE))
        path.chmod(PRIVATE_FILE)
    except OSError as error:
        return (
            InMemoryHistory(),
            f"no history: cannot write '{path}' ({error.strerror}); EDGESPEC_HOME chooses another place",
        )
    return FileHistory(path), None


class _Completer(Completer):
    """Completes commands, what may follow them, and paths."""

    def __init__(self, words: COMPLETIONS, file_commands: frozenset[str]) -> None:
        self._words, self._file_commands = words, file_commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        before = document.text_before_cursor
        if not before.startswith("/") or "\n" in before:
            return
        command, blank, argument = before[1:].partition(" ")
        if not blank:
            for name in self._words:
                if name.startswith(command.lower()):
                    yield Completion(name, start_position=-len(command))
        elif command.lower() in self._file_commands:
            yield from self._paths.get_completions(Document(argument), complete_event)
        else:
            word = argument.rpartition(" ")[2]
            for name in self._words.get(command.lower(), ()):
                if name.startswith(word.lower()):
                    yield Completion(name, start_position=-len(word))


def _keys() -> KeyBindings:
    keys = KeyBindings()
    add = partial(keys.add, filter=~is_searching)  # within Ctrl-R these keys have meanings of their own

    @add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
            return
        if wants_more(buffer.text):
            buffer.insert_text("\n")
        elif buffer.document.is_cursor_at_the_end and continues(buffer.document.current_line):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    add("escape", "enter")(newline)
    add("c-j")(newline)

    @add("c-c")
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @add("c-d")
    def _leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.delete()
        else:
            event.app.exit(exception=EOFError)

    @add("c-g")
    def _edit(event: KeyPressEvent) -> Any:
        event.current_buffer.open_in_editor()

    return keys
