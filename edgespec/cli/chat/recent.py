"""Chats that are saved by themselves after each answer: the last ones, each in a file, to go on with."""

import datetime
import json
import secrets
from contextlib import suppress
from pathlib import Path

import click
from click.core import ParameterSource

from edgespec.cli.chat.settings import saved_settings
from edgespec.cli.chat.state import Chat
from edgespec.cli.options.model import ModelOptions
from edgespec.errors import EdgespecError
from edgespec.hub.adapter_names import NamedAdapter
from edgespec.hub.names import BUILT_IN_TARGET
from edgespec.user_paths import recent_folder, sessions_folder, shown_place

MOST = 20  # files: older ones go
# Settings of a session -> the options of the command line that go before them
FLAGS = {"max_new_tokens": ("max_new_tokens",), "temperature": ("temperature", "greedy"), "stats": ("stats",),
         "spec": ("policy",), "tree_size": ("size", "policy"), "tree_depth": ("depth", "policy")}  # fmt: skip


def save_recent(chat: Chat) -> None:
    """Save the conversation, if it has changed; where that fails it is said once, and no more is saved."""
    conversation = chat.conversation
    if not chat.is_saved or conversation.messages is chat.saved_messages:
        return
    chat.saved_messages = conversation.messages
    if not conversation.messages:
        chat.file = None  # what comes is another conversation
        return
    if chat.file is None or _time_of(chat.file) != chat.file_time:  # another chat goes on with the same one
        name = f"{datetime.datetime.now().astimezone():%Y-%m-%d-%H%M%S}-{secrets.token_hex(2)}.json"
        chat.file = recent_folder() / name
    try:
        conversation.save(chat.file, overwrite=True, settings=saved_settings(chat))
    except EdgespecError as error:
        chat.is_saved = False
        chat.screen.say(f"the chat is not saved, and --resume will not find it: {error.what}")
        return
    chat.file_time = _time_of(chat.file)
    for old in saved_chats(recent_folder())[MOST:]:
        with suppress(OSError):
            old.unlink()


def use_file(chat: Chat, path: Path) -> None:
    """Save to the file that was loaded, if it is one of these: a file of the user's own stays as it is."""
    is_ours = path.parent == recent_folder()
    chat.file, chat.file_time = (path, _time_of(path)) if is_ours else (None, None)
    chat.saved_messages = chat.conversation.messages


def saved_chats(folder: Path) -> list[Path]:
    """Return the chats that are saved in a folder, the last one first."""
    return sorted((path for path in folder.glob("*.json") if _time_of(path)), key=_time_of, reverse=True)


def last_chat() -> Path:
    """Return the file of the last chat; raises EdgespecError where none is saved."""
    found = [path for folder in (recent_folder(), sessions_folder()) for path in saved_chats(folder)]
    if not found:
        what = f"no chat is saved here ({shown_place(recent_folder())})."
        fix = "Start one without --resume; it is saved after each answer, but with --no-save."
        raise EdgespecError("E_SESSION", what, fix)
    return max(found, key=_time_of)


def models_of(path: Path) -> ModelOptions:
    """Return the models that a chat was saved with; raises EdgespecError where the target is there no more."""
    try:
        content = json.loads(path.read_bytes())
        target, draft = content["model"], content["draft_model"]
    except (OSError, ValueError, KeyError, TypeError):
        return ModelOptions(target=None, draft=None)  # the session itself is refused when it is read
    if not isinstance(target, str) or target == str(BUILT_IN_TARGET):
        return ModelOptions(target=None, draft=None)
    if not Path(target).exists():
        what = f"the last chat was with '{target}', which is not there."
        raise EdgespecError("E_MODEL_NOT_FOUND", what, "Name the target to go on with: edgespec chat TARGET --resume.")
    try:
        adapters = tuple(
            NamedAdapter(name=str(name), path=Path(place), scale=scale)
            for name, place, scale in content.get("adapters", [])
        )
    except (ValueError, TypeError):
        adapters = ()
    return ModelOptions(target=Path(target), draft=Path(draft) if isinstance(draft, str) else None, adapters=adapters)


def settings_on_the_line(context: click.Context) -> set[str]:
    """Return the settings that the command line has: they go before those of a session."""
    on_line = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    on_line |= {one for name in on_line for one, flags in FLAGS.items() if name in flags}
    return on_line


def show_last_turn(chat: Chat) -> None:
    """Show the last message and its answer, so that a person sees what they go on with."""
    before, question = chat.conversation.last_turn()
    chat.screen.say(f"> {question}", *(message.content for message in chat.conversation.messages[len(before) + 1 :]))


def _time_of(path: Path) -> int:
    """Return when a file was written, in ns; 0 where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
