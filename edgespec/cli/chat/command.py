"""`edgespec chat`: talk with a model, or ask it one thing."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import click

from edgespec import __version__
from edgespec.chat.tools import Toolset, read_tools
from edgespec.cli.chat.keys import WaitingKeys, silent_keys
from edgespec.cli.chat.recent import last_chat, models_of, settings_on_the_line, show_last_turn
from edgespec.cli.console import Console, counted
from edgespec.cli.ctrl_c import import_engine, leaving_at_once, leaving_tidily, raising_at_the_prompt
from edgespec.cli.longest_context import CONTEXTS, open_longest
from edgespec.cli.open_engine import open_prompt_cache, use_prompt_cache
from edgespec.cli.open_pair import decided, open_pair_for
from edgespec.cli.options.console import console_options
from edgespec.cli.options.distribution import (
    LENGTH_SPELLINGS,
    RAW_HELP,
    SYSTEM_FILE_HELP,
    DrawingOptions,
    read_system,
    require_text,
)
from edgespec.cli.options.engine import EngineOptionsWithTarget
from edgespec.cli.options.numbers import WholeNumber
from edgespec.cli.options.record import option, options_of, settle
from edgespec.cli.options.sections import FIRST, LAST, SectionedCommand
from edgespec.cli.prompts.read import read_text
from edgespec.errors import EdgespecError
from edgespec.hub.names import WORDS, short_name
from edgespec.text.context import check_length, doubtful_ends
from edgespec.validation import json_or_text

if TYPE_CHECKING:
    from edgespec.cli.chat.state import Chat
    from edgespec.engine import Engine

SECTIONS = {
    FIRST: (
        "prompt_text", "single_turn", "model", "draft_model", "system", "max_new_tokens", "temperature", "seed",
        "ctx_size", "max_gpu_mem",
    ),
    "Chat": (
        "images", "resume", "save", "system_file", "tools", "raw", "chat_template", "template_arg",
        "reasoning_budget", "reasoning_budget_message", "history", "stats", "color",
    ),
    **LAST,
}  # fmt: skip
RAW_NEW_TOKENS = 256  # a model without a chat template seldom ends by itself
COLORS = ("auto", "always", "never")
PATIENCE_S = 3.0  # with a pipe that does not end
WAITING = "stdin is part of the message, and has not ended (where it has nothing to do with it: </dev/null)"
LENGTH_HELP = (
    "Limit each answer to so many tokens; -1: to the context's end. [default: -1; without a chat template 256]"
)
PROMPT_HELP = "Send this first; a pipe's text follows in it."
IMAGE_HELP = "Show this picture with the first message, before its text; repeatable."
TOOLS_HELP = "Let the model call the tools of this file, OpenAI's list in JSON; you type their results."
RESUME_HELP = "Continue the last chat: its messages, its settings, and its models where no other are named."
SAVE_HELP = "Keep the chat after each answer, for --resume; the last 20 stay. [default: yes]"
COLOR_HELP = "Colour what is not the answer; NO_COLOR counts."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(DrawingOptions):
    """What to say first, how to answer, and how to look."""

    prompt_text: str | None = option("-p", "--prompt", metavar="TEXT", help=PROMPT_HELP)
    single_turn: bool = option("-st", "--single-turn", is_flag=True, help="Leave after one answer, as in a pipe.")
    images: tuple[str, ...] = option("--image", multiple=True, metavar="FILE", help=IMAGE_HELP)
    resume: bool = option("--resume", is_flag=True, help=RESUME_HELP)
    system: str | None = option("--system", "--system-prompt", "-sys", help="Use this system message.")
    system_file: str | None = option("--system-file", metavar="FILE", help=SYSTEM_FILE_HELP)
    raw: bool = option("--raw", "--ignore-chat-template", is_flag=True, help=RAW_HELP)
    tools: str | None = option("--tools", metavar="FILE", help=TOOLS_HELP)
    max_new_tokens: int | None = option("-n", *LENGTH_SPELLINGS, type=WholeNumber(), help=LENGTH_HELP)
    save: bool = option("--save/--no-save", default=True, help=SAVE_HELP)
    history: bool = option(
        "--history/--no-history", default=True, help="Keep what is typed for the next chat. [default: yes]"
    )
    stats: bool = option("--stats/--no-stats", default=True, help="Show a line below every answer. [default: yes]")
    color: str = option("--color", type=click.Choice(COLORS), default="auto", show_default=True, help=COLOR_HELP)
    toolset: Toolset = field(init=False)

    def __post_init__(self) -> None:
        DrawingOptions.__post_init__(self)
        if self.max_new_tokens is not None:
            check_length(self.max_new_tokens)
        require_text("-p", self.prompt_text or "")
        settle(
            self, system=read_system(self.system, self.system_file), system_file=None, toolset=_read_tools(self.tools)
        )


def _read_tools(path: str | None) -> Toolset:
    """Return the tools of a file; raises EdgespecError."""
    if path is None:
        return Toolset()
    listed = json_or_text(read_text(path, what="a file with OpenAI's list of tools"), is_strict=True)
    try:
        return read_tools(listed)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"--tools: {error.what}", error.fix) from error


@click.command(
    name="chat",
    short_help="Talk with a model: a turn reads only what is new.",
    cls=SectionedCommand,
    sections=SECTIONS,
    examples="""\
edgespec chat                                the built-in pair: it continues Python
edgespec chat TARGET -md DRAFT -c 8k
git diff | edgespec chat TARGET -md DRAFT -p 'Review this.'
""",
    epilog="""\b
/help lists the commands, /? keys the keys. Without a chat template messages and answers are one text, in which a
message begins on a line of its own. A pipe is one turn: the message is all of stdin, below the text of -p where there
is one (-p - is stdin alone); stdout has the answer alone.
""",
)
@options_of(ChatOptions, handed_on_as="options")
@options_of(EngineOptionsWithTarget, handed_on_as="engine_options")
@console_options(has_verbose=True)
def command(*, options: ChatOptions, engine_options: EngineOptionsWithTarget, console: Console) -> int:
    """Talk with TARGET: several turns, each of which reads only what is new.

    Answers go to stdout as they are verified, everything else to stderr.
    """
    engine_options.template.check(raw=options.raw)
    models, trees, machine = engine_options.models, engine_options.trees, engine_options.machine
    is_single = options.single_turn or not sys.stdin.isatty()
    if options.resume and is_single:
        raise click.UsageError("--resume opens a chat on a terminal: leave it out with --single-turn or in a pipe.")
    first = _first_message(console, options)
    session = last_chat() if options.resume else None
    if session is not None and models.target is None and models.draft is None and not models.drafts:
        saved = models_of(session)
        models = replace(saved, adapters=models.adapters or saved.adapters, draft_adapters=models.draft_adapters)
        engine_options = replace(engine_options, models=models)
    draft = models.draft if trees.settings.needs_draft else None
    names = [short_name(path) for path in (models.target, draft) if path and path not in WORDS]
    console.say(f"edgespec {__version__} · {' + '.join(names) or 'the built-in pair'}")

    with silent_keys() as keys:
        import_engine(console, tidy=keys.restore)
        with leaving_at_once(keys.restore):
            from edgespec.cli.chat.actions import attached_pictures, open_session
            from edgespec.cli.chat.loop import converse, single_turn
        with leaving_tidily():
            with console.status("reading headers"):
                pair = open_pair_for(console, engine_options)
                temperature = options.sampling_of(pair).temperature
                pair = decided(pair, engine_options, temperature=temperature)
                attachments = attached_pictures(pair, options.images, is_raw=options.raw)
                cache = open_prompt_cache(
                    engine_options.prompt_cache, pair, machine.run_config(pair, context_tokens=CONTEXTS[-1])
                )
            engine = open_longest(console, pair, engine_options, temperature=temperature)
        with engine:
            chat = _open_chat(console, engine, options, keys, is_single=is_single)
            chat.attachments.extend(attachments)
            use_prompt_cache(console, engine, cache, [chat.conversation.first_ids(word) for word in ("a", "b")])
            if is_single:
                return single_turn(chat, first or "")
            if session is not None:
                open_session(chat, session, given=settings_on_the_line(click.get_current_context()))
                chat.conversation.system = options.system or chat.conversation.system
                show_last_turn(chat)
            with raising_at_the_prompt():
                return converse(chat, first)


def _first_message(console: Console, options: ChatOptions) -> str | None:
    """Return the message of the command line and the pipe, if any; raises EdgespecError where both are empty."""
    text, is_dash = options.prompt_text or "", options.prompt_text == "-"
    if is_dash or not sys.stdin.isatty():
        piped = _piped(console) if text.strip() and not is_dash else read_text("-", what="a message")
        text = "\n\n".join(part for part in ("" if is_dash else text, piped.removesuffix("\n")) if part.strip())
    elif options.prompt_text is None and not options.single_turn:
        return None
    if not text.strip():
        raise EdgespecError("E_PROMPT_EMPTY", "there is no message.", "Give one with -p, or on stdin.")
    return text


def _piped(console: Console) -> str:
    """Return what comes through stdin beside a message, and say so; raises EdgespecError for what is no text."""
    waiting = threading.Timer(PATIENCE_S, console.say, [WAITING])
    waiting.start()
    try:
        text = read_text("-", what="a message")
    except EdgespecError as error:
        if error.code != "E_FILE_NOT_FOUND":
            raise
        return ""  # it cannot be read, as below nohup
    finally:
        waiting.cancel()
    if text.strip():
        console.say(f"the message is -p and {counted(len(text.splitlines()), 'line')} of stdin")
    return text


def _open_chat(console: Console, engine: Engine, options: ChatOptions, keys: WaitingKeys, *, is_single: bool) -> Chat:
    """Return the conversation with the screen and the line editor that it uses."""
    from edgespec.cli.chat.screen import Screen
    from edgespec.cli.chat.state import Chat
    from edgespec.cli.prompts.report import template_notes

    conversation = engine.chat(
        system=options.system,
        raw=options.raw,
        sampling=options.sampling_of(engine.pair),
        seed=options.seed,
        stop=options.stop,
    )
    conversation.use_tools(options.toolset)
    length = options.max_new_tokens or (RAW_NEW_TOKENS if conversation.is_raw else -1)
    conversation.options["max_new_tokens"] = length
    chat = Chat(
        engine=engine,
        conversation=conversation,
        screen=Screen(console, color=options.color),
        keys=keys,
        own_tree=engine.tree,
        shows_stats=options.stats,
        is_saved=options.save and not is_single,
    )
    sampling = conversation.options["sampling"]
    assert sampling is not None
    console.say(
        f"context {engine.max_context} tokens · temperature {sampling.temperature:g} · "
        f"answers of {'any length' if length < 0 else f'up to {length} tokens'}"
    )
    if conversation.is_raw and not options.raw:
        console.say("no chat template: your text and the model's are one, and it continues yours")
    elif not conversation.is_raw:
        names = {*engine.pair.template_args, *(["tools"] if options.toolset.seen else [])}
        for note in template_notes(engine.pair, names, has_system=bool(conversation.system)):
            console.say(note)
    with suppress(EdgespecError):  # of a template, which is said when there is a message
        for doubt in doubtful_ends(conversation.first_ids("a"), engine.pair):
            console.say(f"every message {doubt}")
    if not is_single:
        from edgespec.cli.chat.actions import ACTIONS, SUBJECTS
        from edgespec.cli.chat.line_editor import open_reader
        from edgespec.cli.chat.settings import SETTINGS, SPECS
        from edgespec.user_paths import history_file

        words: dict[str, tuple[str, ...]] = dict.fromkeys(ACTIONS, ())
        words |= {alias: () for action in ACTIONS.values() for alias in action.aliases}
        words |= {
            "set": tuple(SETTINGS),
            "show": tuple(SUBJECTS),
            "spec": SPECS,
            "tree": ("auto",),
            "help": tuple(ACTIONS),
        }
        chat.read_message, problem = open_reader(
            history=history_file() if options.history else None,
            words=words,
            file_commands=("read", "file", "save", "save!", "load"),
            color=chat.screen.has_color,
            typed=keys.typed,
        )
        if problem:
            console.say(problem)
        console.say("/help lists the commands, Ctrl-D leaves")
    return chat
