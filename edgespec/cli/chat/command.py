"""`edgespec chat`: talk with a model, or ask it one thing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec import __version__
from edgespec.cli.chat.options import AskedChat, chat_options
from edgespec.cli.console import Console
from edgespec.cli.ctrl_c import leaving_at_once, leaving_tidily
from edgespec.cli.models.open_named import open_named_pair
from edgespec.cli.options.options import (
    MachineOptions,
    given_tree,
    machine_options,
    model_options,
    profile_option,
    tree_options,
)
from edgespec.cli.prompts.read import read_text
from edgespec.cli.spelling import spelled
from edgespec.errors import EdgespecError
from edgespec.pair.hub_names import short_name
from edgespec.tree.settings import TreeSettings

if TYPE_CHECKING:
    from edgespec.cli.chat.state import Chat
    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair

CONTEXTS = (8192, 4096, 2048, 1024, 512)  # that -c auto tries, the first that memory has room for
RAW_NEW_TOKENS = 256  # a model without a chat template seldom ends by itself


@click.command(
    name="chat",
    epilog="""\b
Examples:
  edgespec chat                                   the built-in pair: it continues Python
  edgespec chat TARGET -md DRAFT -c 8k
  edgespec chat TARGET --system 'Be brief.' --temp 0.7
  git diff | edgespec chat TARGET -md DRAFT --system 'Review this.'

\b
/help lists the commands, /? keys the keys. Without a chat template messages and answers are one text, in which a
message begins on a line of its own. A pipe is one turn: all of stdin is the message, stdout has the answer alone.
""",
)
@click.argument("target", required=False, type=click.Path(path_type=Path))
@model_options
@chat_options
@tree_options
@profile_option
@machine_options
@click.option("--no-self-check", is_flag=True, help="Do not try whether the model's family reads token trees rightly.")
@click.option("-q", "--quiet", is_flag=True, help="Print answers and errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Print the memory plan in full; -vv: and the trace of an error.")
def command(
    *,
    target: Path | None,
    model: Path | None,
    draft_model: Path | None,
    asked: AskedChat,
    tree: TreeSettings,
    profile: str,
    machine: MachineOptions,
    no_self_check: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Talk with TARGET: several turns, each of which reads only what is new.

    Answers go to stdout as they are verified, everything else to stderr.
    """
    console = Console(quiet=quiet, verbose=verbose)
    folder = target or model
    if draft_model is not None and folder is None:
        raise EdgespecError("E_SETTING", "-md needs a target: a draft goes with one.", "Name both, or neither.")
    is_single = asked.is_single_turn or not sys.stdin.isatty()
    first = _first_message(asked)
    names = [short_name(path) for path in (folder, draft_model if tree.policy != "none" else None) if path]
    console.say(f"edgespec {__version__} · {' + '.join(names) or 'the built-in pair'}")

    with leaving_at_once():  # torch and transformers are imported from here on
        import edgespec.engine  # noqa: F401
        from edgespec.cli.chat.loop import converse, single_turn
    with leaving_tidily():
        pair = open_named_pair(folder, draft_model)
        if pair.draft is None and tree.policy != "none":
            console.say("no draft (-md): decoding plainly, one token a pass")
        engine = _load(console, pair, asked, tree=tree, profile=profile, machine=machine, self_check=not no_self_check)
    with engine:
        chat = _open_chat(console, engine, asked, is_single=is_single)
        if is_single:
            return single_turn(chat, first or "")
        return converse(chat, first)


def _first_message(asked: AskedChat) -> str | None:
    """Return the message that the command line or the pipe gave, if any; raises EdgespecError for an empty pipe."""
    text = asked.prompt
    if text == "-" or (text is None and not sys.stdin.isatty()):
        text = read_text("-", what="a message").removesuffix("\n")
    if text is None and not asked.is_single_turn:
        return None
    if not (text or "").strip():
        raise EdgespecError("E_PROMPT_EMPTY", "there is no message.", "Give one with -p, or on stdin.")
    return text


def _load(
    console: Console,
    pair: ModelPair,
    asked: AskedChat,
    *,
    tree: TreeSettings,
    profile: str,
    machine: MachineOptions,
    self_check: bool,
) -> Engine:
    """Say the plan and load the engine, with room for a conversation."""
    from edgespec.cli.plan_notes import loading_progress, say_plan, say_quantizing
    from edgespec.engine import Engine
    from edgespec.model.device import resolve_device
    from edgespec.profiled import settle
    from edgespec.text.context import check_ctx_size

    if machine.ctx_size is not None:
        check_ctx_size(machine.ctx_size, pair.max_context)
    most = pair.max_context or CONTEXTS[0]
    contexts = [machine.ctx_size] if machine.ctx_size else sorted({min(most, size) for size in CONTEXTS}, reverse=True)

    def load(context_tokens: int) -> Engine:
        settled = settle(
            pair if tree.policy != "none" else replace(pair, draft=None),
            source=profile,
            given=given_tree(click.get_current_context()),
            temperature=replace(pair.default_sampling(), **asked.chosen).temperature,
            limits=machine.limits,
            device=resolve_device(machine.device),
            dtype=machine.dtype,
            quant=machine.quant,
            draft_quant=machine.draft_quant,
            context_tokens=context_tokens,
            prompt_tokens=context_tokens,
        )

        def on_plan(engine: Engine) -> None:
            for note in settled.notes:
                console.say(spelled(note))
            say_plan(console, pair, engine.tree, engine, settled, machine, device=engine.device, dtype=engine.dtype)

        with ExitStack() as stack:

            @functools.cache
            def progress() -> Callable[[str, int, int], None]:
                return loading_progress(console, stack.enter_context(console.progress_bar()))

            return Engine(
                pair,
                tree=settled.tree,
                profile=settled.profile,
                limits=machine.limits,
                device=machine.device,
                dtype=machine.dtype,
                quant=machine.quant,
                draft_quant=machine.draft_quant,
                context_tokens=context_tokens,
                prompt_tokens=context_tokens,
                self_check=self_check,
                on_plan=on_plan,
                on_quantize=functools.partial(say_quantizing, console),
                progress=lambda *done: progress()(*done),  # a bar from here on: the plan is said before it
            )

    for context_tokens in contexts[:-1]:
        try:
            return load(context_tokens)
        except EdgespecError as error:
            if error.code != "E_MEMORY":
                raise
    return load(contexts[-1])


def _open_chat(console: Console, engine: Engine, asked: AskedChat, *, is_single: bool) -> Chat:
    """Return the conversation with the screen and the line editor that it uses."""
    from edgespec.cli.chat.screen import Screen
    from edgespec.cli.chat.state import Chat

    conversation = engine.chat(
        system=asked.system,
        raw=asked.raw,
        sampling=replace(engine.pair.default_sampling(), **asked.chosen),
        seed=asked.seed,
        stop=asked.stop,
    )
    length = asked.max_new_tokens or (RAW_NEW_TOKENS if conversation.is_raw else -1)
    conversation.wishes["max_new_tokens"] = length
    chat = Chat(
        engine=engine,
        conversation=conversation,
        screen=Screen(console, color=asked.color),
        reader=None,
        own_tree=engine.tree,
        shows_stats=asked.stats,
    )
    sampling = conversation.wishes["sampling"]
    assert sampling is not None
    console.say(
        f"context {engine.max_context} tokens · temperature {sampling.temperature:g} · "
        f"answers of {'any length' if length < 0 else f'up to {length} tokens'}"
    )
    if conversation.is_raw and not asked.raw:
        console.say("no chat template: your text and the model's are one, and it continues yours")
    if not is_single:
        from edgespec.cli.chat.actions import ACTIONS, SUBJECTS
        from edgespec.cli.chat.line_editor import open_reader
        from edgespec.cli.chat.settings import SETTINGS, SPECS
        from edgespec.files import history_file

        words: dict[str, tuple[str, ...]] = dict.fromkeys(ACTIONS, ())
        words |= {alias: () for action in ACTIONS.values() for alias in action.aliases}
        words |= {"set": tuple(SETTINGS), "show": SUBJECTS, "spec": SPECS, "tree": ("auto",), "help": tuple(ACTIONS)}
        chat.reader, problem = open_reader(
            history=history_file() if asked.keeps_history else None,
            words=words,
            file_commands=("read", "file", "save", "save!", "load"),
            color=chat.screen.has_color,
        )
        if problem:
            console.say(problem)
        console.say("/help lists the commands, Ctrl-D leaves")
    return chat
