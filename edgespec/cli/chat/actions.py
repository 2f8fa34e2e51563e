"""The commands of a chat: what each does, by its name."""

import datetime
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgespec.chat.picture_parts import sources_of, with_sources
from edgespec.chat.picture_prompt import picture_reader
from edgespec.cli.chat.answers import answer, give_result, session_report
from edgespec.cli.chat.parse import closest, first_line
from edgespec.cli.chat.recent import use_file
from edgespec.cli.chat.settings import (
    adapters_in_words,
    change_settings,
    restore_settings,
    saved_settings,
    show_settings,
    use_adapters,
    use_spec,
    use_tree_size,
)
from edgespec.cli.chat.state import Attachment, Chat
from edgespec.cli.console import counted
from edgespec.cli.open_engine import engine_trees_in_words
from edgespec.cli.options.files import check_files
from edgespec.cli.options.model import ModelOptions
from edgespec.cli.prompts.read import read_text
from edgespec.cli.prompts.report import template_notes
from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair
from edgespec.user_paths import expanded, require_place, sessions_folder

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
PASTED = re.compile(r"\s*(?:\"([^\"\n]+)\"|'([^'\n]+)'|((?:\\.|[^\s\\'\"])+))(?:\s+|$)")  # a path, perhaps quoted
USAGE_COLUMNS = 24  # of the list of commands; what they do has the rest of a line of 80
KEYS = """\
Enter             send                       Alt-Enter, Ctrl-J  new line
\"\"\" ... \"\"\"       several lines              \\ at a line's end  go on below
Up, Down          what was typed before      Ctrl-R             search it
Tab               complete                   Ctrl-X Ctrl-E, Ctrl-G  editor ($VISUAL, $EDITOR)
Ctrl-L            clear the screen           Ctrl-D             leave
Ctrl-C            clear the line; in an answer: stop after this pass, again: within it, again: leave"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A command of the chat."""

    usage: str
    help: str
    run: Callable[[Chat, str], None]  # raises EdgespecError
    aliases: tuple[str, ...] = ()


def handle_command(chat: Chat, name: str, argument: str) -> None:
    """Run the command that has this name or alias; raises EdgespecError where there is none."""
    known = {word: key for key, action in ACTIONS.items() for word in (key, *action.aliases)}
    if name not in known:
        near = closest(name, known)
        raise EdgespecError(
            "E_COMMAND",
            f"Unknown command /{name}; it was not sent.",
            (f"Did you mean /{near}? " if near else "/help lists the commands. ")
            + "Begin a line with // to send one that starts with /.",
        )
    ACTIONS[known[name]].run(chat, argument)


def _help(chat: Chat, argument: str) -> None:
    name = argument.lower().removeprefix("/")
    if name == "keys":
        chat.screen.say(KEYS)
        return
    chosen = {key: action for key, action in ACTIONS.items() if name in {"", key, *action.aliases}}
    if not chosen:
        raise EdgespecError("E_COMMAND", f"there is no command /{name}.", "/help lists them.")
    for action in chosen.values():
        also = f" (/{', /'.join(action.aliases)})" if action.aliases else ""
        chat.screen.say(f"{action.usage:<{USAGE_COLUMNS}}{action.help}{also}")
    if not name:
        chat.screen.say(f"{'/? keys':<{USAGE_COLUMNS}}shortcuts")


def _exit(chat: Chat, _argument: str) -> None:
    chat.is_over = True


def _clear(chat: Chat, _argument: str) -> None:
    count = chat.conversation.clear()
    chat.attachments.clear()
    chat.screen.say(f"cleared {counted(count, 'turn')}")


def _system(chat: Chat, argument: str) -> None:
    old = chat.conversation.system
    if not argument:
        if chat.read_message is None:
            chat.screen.say(old or "no system message")
            return
        argument = chat.read("system> ", default=old or "").strip()
    if (argument or None) == old:
        chat.screen.say("the system message is as it was")
        return
    chat.conversation.system = argument or None
    chat.screen.say(f"system message {'set' if argument else 'removed'}; the next turn reads everything again")
    if argument and not chat.conversation.is_raw:
        chat.screen.say(*template_notes(chat.engine.pair, (), has_system=True))


def _set(chat: Chat, argument: str) -> None:
    chat.screen.say(*(change_settings(chat, argument) if argument else show_settings(chat)))


def _show(chat: Chat, argument: str) -> None:
    subject = argument.lower() or "settings"
    if subject not in SUBJECTS:
        raise EdgespecError("E_COMMAND", f"there is no '{subject}' to show.", f"Choose one of: {', '.join(SUBJECTS)}.")
    chat.screen.say(*SUBJECTS[subject](chat))


def _model(chat: Chat) -> list[str]:
    from edgespec.placement.number_formats import quant_named

    engine, conversation, draft = chat.engine, chat.conversation, chat.engine.pair.draft
    target, run_config = engine.pair.target, engine.run_config
    return [
        f"target  {target.folder} (quant {quant_named(target, run_config.quant)})",
        f"draft   {draft.named} (quant {quant_named(draft, run_config.draft_quant)})" if draft else "draft   none",
        f"context {conversation.num_tokens} of {engine.max_context} tokens, {counted(conversation.num_turns, 'turn')}",
        f"trees   {engine_trees_in_words(engine)}",
    ]


def _template(chat: Chat) -> list[str]:
    none = "no chat template: the messages are one text"
    return [none if chat.conversation.is_raw else str(chat.engine.pair.tokenizer.chat_template)]


def _prompt(chat: Chat) -> list[str]:
    ids = chat.conversation.prompt_ids(chat.conversation.messages)
    return [str(chat.engine.pair.tokenizer.decode(ids)), f"({counted(len(ids), 'token')})"]


def _stats(chat: Chat, _argument: str) -> None:
    engine = chat.engine
    pass_bytes, expert_bytes = engine.placement.every_pass_bytes, engine.expert_counts.read_bytes
    chat.screen.say(*session_report(chat.turns, pass_bytes=pass_bytes, expert_bytes=expert_bytes))


def _compact(chat: Chat, _argument: str) -> None:
    dropped = chat.conversation.compact()
    questions = [message.content for message in dropped if message.role == "user"]
    chat.screen.say(*(f"dropped: {first_line(question)}" for question in questions))
    turns, left = counted(len(questions), "turn"), counted(chat.conversation.num_turns, "turn")
    tokens = f"{chat.conversation.num_tokens} of {chat.engine.max_context} tokens"
    chat.screen.say(f"dropped the oldest {turns}; {left} left, {tokens}; the next answer reads them again")


def _regenerate(chat: Chat, _argument: str) -> None:
    sampling = chat.conversation.options.get("sampling")
    if sampling is not None and sampling.temperature == 0 and chat.conversation.num_turns:
        chat.screen.note("temperature 0: the same text again")
    answer(chat, lambda on_prefill: chat.conversation.regenerate(on_prefill=on_prefill))


def _continue(chat: Chat, _argument: str) -> None:
    resume = chat.conversation.resume
    answer(chat, lambda on_prefill: resume(on_prefill=on_prefill), nothing="the last answer is as it was")


def _undo(chat: Chat, _argument: str) -> None:
    question = chat.conversation.undo()
    chat.screen.say(f"took back: {first_line(question)}")


def _edit(chat: Chat, argument: str) -> None:
    _, question = chat.conversation.last_turn()
    if not argument and chat.read_message is None:
        raise EdgespecError("E_COMMAND", "there is no terminal to edit in.", "Write /edit NEW TEXT.")
    text = argument or chat.read("edit> ", default=question)
    if text.strip():
        answer(chat, lambda on_prefill: chat.conversation.edit(text, on_prefill=on_prefill))


def _read(chat: Chat, argument: str) -> None:
    if not argument:
        chat.screen.say(*(f"attached: {attachment.path}" for attachment in chat.attachments))
        if not chat.attachments:
            raise EdgespecError("E_COMMAND", "/read needs a file.", "Write /read FILE.")
        return
    path = expanded(argument)
    attachment = Attachment(
        path=path, text=read_text(str(path.absolute()), what="a text file")
    )  # absolute: - is no stdin
    chat.conversation.check_room(chat.with_attachments("", attachment))
    chat.attachments.append(attachment)
    count = len(chat.engine.pair.tokenizer.encode(attachment.text, add_special_tokens=False))
    share = count / chat.engine.max_context
    chat.screen.say(
        f"{path}: {counted(count, 'token')}, {share:.0%} of the context; it goes before your next message "
        "(Enter alone sends it)"
    )


def _image(chat: Chat, argument: str) -> None:
    if not argument:
        raise EdgespecError("E_COMMAND", "/image needs a file.", "Write /image FILE.")
    if chat.conversation.pending_calls:
        raise EdgespecError("E_COMMAND", "a picture belongs to a message, and a call waits for a result.", "Answer it.")
    path = expanded(argument).absolute()
    before = chat.conversation.num_tokens
    count = chat.conversation.check_room(chat.with_attachments(""), images=[*chat.pictures, path]) - before
    chat.attachments.append(Attachment(path=path, is_picture=True))
    chat.screen.say(f"{path}: the next message has {counted(count, 'token')} so far (Enter alone sends it)")


def attached_pictures(pair: ModelPair, images: Sequence[str], *, is_raw: bool) -> list[Attachment]:
    """Return the pictures of a command line, each of which was read once.

    Raises EdgespecError, also where the pair's target does not see, or has no template to place them.
    """
    if not images:
        return []
    picture_reader(pair.target, pair.tokenizer.name_or_path)
    if is_raw or not pair.tokenizer.chat_template:
        raise EdgespecError(
            "E_CHAT_TEMPLATE", "--image needs a chat template, which places the picture.",
            "Leave --raw out, or give --chat-template FILE; edgespec generate --raw --image takes a placeholder.",
        )  # fmt: skip
    parts = [{"type": "image", "image": str(expanded(image))} for image in images]
    attachments = []
    for source in sources_of(with_sources([{"role": "user", "content": parts}], folder=Path())):
        source.read()
        if not isinstance(source.given, Path):
            raise EdgespecError("E_PICTURE", f"{source.where} is an address with data.", "Write --image FILE.")
        attachments.append(Attachment(path=source.given.absolute(), is_picture=True))
    return attachments


def attach_pasted(chat: Chat, text: str) -> str:
    """Attach the pictures whose paths a message begins with, as terminals write what is dropped; return the rest."""
    while found := PASTED.match(text):
        written = found[1] or found[2] or re.sub(r"\\(.)", r"\1", found[3])
        path = expanded(written.removeprefix("file://"))
        if path.suffix.lower() not in PICTURE_SUFFIXES or not path.is_file():
            break
        _image(chat, str(path))
        text = text[found.end() :]
    return text


def new_session() -> Path:
    """Return the file of a session that is saved without a name."""
    return sessions_folder() / f"{datetime.datetime.now().astimezone():%Y-%m-%d-%H%M%S}.json"


def _save(chat: Chat, argument: str, *, overwrite: bool = False) -> None:
    if not argument:
        require_place(sessions_folder())
    path = expanded(argument) if argument else new_session()
    conversation, pair = chat.conversation, chat.engine.pair
    models = ModelOptions(target=pair.target.folder, draft=pair.draft.folder if pair.draft else None)
    check_files(*models.named_folders(), more=[("/save", path)])
    stats = {
        "answers": len(chat.turns),
        "completion_tokens": sum(turn.result.usage.completion_tokens for turn in chat.turns),
        "total_s": round(sum(turn.result.total_s for turn in chat.turns), 3),
    }
    conversation.save(path, overwrite=overwrite, settings=saved_settings(chat), stats=stats)
    chat.screen.say(f"saved {counted(conversation.num_turns, 'turn')} to {path}")


def _load(chat: Chat, argument: str) -> None:
    if not argument:
        raise EdgespecError("E_COMMAND", "/load needs a file.", "Write /load FILE.")
    path = expanded(argument)
    if not path.exists() and not path.is_absolute():
        path = next((p for p in (sessions_folder() / path, sessions_folder() / f"{path}.json") if p.exists()), path)
    open_session(chat, path)


def open_session(chat: Chat, path: Path, *, given: Container[str] = ()) -> None:
    """Go on with a saved session, and its settings but for those that are `given`. Raises EdgespecError."""
    conversation = chat.conversation
    before = conversation.system, conversation.messages
    session = conversation.load(path)
    if conversation.num_tokens >= chat.engine.max_context:
        needed = conversation.num_tokens
        conversation.system, conversation.messages = before
        what = f"the session has {needed} tokens, and the context holds {chat.engine.max_context} with an answer."
        raise EdgespecError("E_CONTEXT", what, "Start with a larger -c.")
    use_file(chat, path)
    settings = {name: value for name, value in session.settings.items() if name not in given}
    chat.screen.say(*restore_settings(chat, settings))
    if session.model != str(chat.engine.pair.target.folder):
        chat.screen.say(f"it was saved with {session.model}")
    turns, tokens = counted(conversation.num_turns, "turn"), counted(conversation.num_tokens, "token")
    chat.screen.say(f"loaded {turns}, {tokens}")


def _spec(chat: Chat, argument: str) -> None:
    if argument:
        use_spec(chat, argument.lower())
    engine = chat.engine
    chat.screen.say(f"spec {chat.spec}: {engine_trees_in_words(engine)}")


def _tree(chat: Chat, argument: str) -> None:
    if argument:
        use_tree_size(chat, argument.lower())
    _spec(chat, "")


def _adapter(chat: Chat, argument: str) -> None:
    if argument:
        use_adapters(chat, argument)
    chosen = adapters_in_words(chat)
    given = [f"{one.name}:{one.scale:g}" for one in chat.engine.pair.target.adapters]
    of_text = f"adapters {chosen}" if chosen else "adapters as they were given"
    chat.screen.say(f"{of_text}; there are {', '.join(given)}" if given else "no adapters: the chat has no --lora")


SUBJECTS: dict[str, Callable[[Chat], list[str]]] = {
    "settings": show_settings,
    "model": _model,
    "memory": lambda chat: [str(chat.engine.placement)],
    "system": lambda chat: [chat.conversation.system or "no system message"],
    "template": _template,
    "prompt": _prompt,
}
ACTIONS = {
    "help": Action(usage="/help [COMMAND]", help="this list", run=_help, aliases=("?",)),
    "exit": Action(usage="/exit", help="leave; Ctrl-D too", run=_exit, aliases=("quit", "bye")),
    "clear": Action(usage="/clear", help="forget all turns; the system message stays", run=_clear, aliases=("new",)),
    "compact": Action(usage="/compact", help="drop the oldest turns, until half of the context is free", run=_compact),
    "system": Action(usage="/system [TEXT]", help="set or edit the system message", run=_system),
    "set": Action(usage="/set [NAME VALUE]", help="change settings, as temperature 0.7 or top_p=0.9 seed=1", run=_set),
    "show": Action(usage="/show [SUBJECT]", help=" | ".join(SUBJECTS), run=_show),
    "stats": Action(usage="/stats", help="what the session took so far", run=_stats),
    "regen": Action(usage="/regen", help="answer the last message again", run=_regenerate, aliases=("r", "retry")),
    "continue": Action(usage="/continue", help="go on with an answer that was cut", run=_continue, aliases=("go",)),
    "undo": Action(usage="/undo", help="take the last message and its answer back", run=_undo),
    "edit": Action(usage="/edit [TEXT]", help="change the last message, and answer it", run=_edit),
    "result": Action(usage="/result TEXT", help="give the result of a call, as typing it does", run=give_result),
    "read": Action(usage="/read FILE", help="put a text file before the next message", run=_read, aliases=("file",)),
    "image": Action(usage="/image FILE", help="show a picture with the next message; a pasted path too", run=_image),
    "save": Action(usage="/save [FILE]", help="write a session, or x.md for reading; never over a file", run=_save),
    "save!": Action(
        usage="/save! FILE", help="the same, over a file that is there", run=partial(_save, overwrite=True)
    ),
    "load": Action(usage="/load FILE", help="go on with a saved session", run=_load),
    "spec": Action(usage="/spec [off|tree|chain]", help="how to draft, from the next answer on", run=_spec),
    "adapter": Action(
        usage="/adapter [NAME:SCALE]",
        help="adapters from the next answer on, several, none or auto",
        run=_adapter,
        aliases=("lora",),
    ),
    "tree": Action(usage="/tree [N|auto]", help="nodes of a tree, from the next answer on", run=_tree),
}
