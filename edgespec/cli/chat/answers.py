"""One answer: shown as it is verified, stopped by Ctrl-C, and what it took below it.

Ctrl-C sets flags that are looked at between passes and layers, so that nothing is torn: the first ends the answer
after its pass, the second within it, the third ends the program.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING

from edgespec.cli.chat.footer import GIB, Turn, footer
from edgespec.cli.chat.state import Chat
from edgespec.cli.ctrl_c import EXIT_INTERRUPTED, STDERR, cancelling, stopping_notice
from edgespec.cli.faults import memory_error
from edgespec.cli.open_engine import engine_trees_in_words
from edgespec.errors import EdgespecError, is_out_of_memory

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.text.handle import OnPrefill
    from edgespec.text.results import TextChunk

NOTICES = (stopping_notice(line_width=None), b"\nabandoning the pass (Ctrl-C again: leave the program)\n")
Ask = Callable[["OnPrefill"], Generator["TextChunk", None, None]]


def answer(chat: Chat, ask: Ask) -> bool:
    """Show what `ask` yields, and return whether there was an answer, whole or not. Raises EdgespecError."""
    screen, conversation = chat.screen, chat.conversation
    before, largest_tree = conversation.last, chat.engine.largest_tree
    failure: EdgespecError | None = None
    screen.begin_answer()
    try:
        with (
            cancelling(chat.engine, notices=NOTICES, give_up=partial(_leave, chat.keys.restore)) as num_pressed,
            contextlib.closing(ask(screen.prefill)) as chunks,
        ):
            for chunk in chunks:
                screen.answer(chunk.text)
                if num_pressed():  # also where the key came before there was anything to cancel
                    chat.engine.cancel()
    except EdgespecError as error:
        failure = error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fix = "Use a smaller /tree, or start with a lower -ngl, --max-gpu-mem or --tree-size."
        failure = memory_error("memory ran out.", fix)
    finally:
        screen.end_answer()
    result = None if conversation.last is before else conversation.last
    if result is not None and result.steps:
        chat.turns.append(Turn(result=result, spec=chat.spec))
        _say_footer(chat)
        if chat.engine.largest_tree != largest_tree:
            now = engine_trees_in_words(chat.engine)
            screen.say(f"memory ran out in a pass: {now} from here on")
    elif result is not None:
        screen.note("nothing was answered; the message is not kept (Up brings it back)")
    if failure is not None:
        raise failure
    return result is not None and bool(result.steps)


def _say_footer(chat: Chat) -> None:
    result, engine = chat.conversation.last, chat.engine
    assert result is not None
    stopped = "" if result.finish_reason == "stop" else f"stopped: {result.finish_reason}"
    if not chat.shows_stats:
        if stopped:
            chat.screen.note("", warning=stopped)
        return
    line = footer(
        result,
        used=result.usage.total_tokens,
        max_context=engine.max_context,
        trees=engine.trees_in_use(result.sampling),
        gpu=_gpu_use(engine),
        width=chat.screen.console.width - (len(stopped) + 4 if stopped else 1),
    )
    chat.screen.note(line, warning=stopped)
    if result.finish_reason == "context":
        oldest = "/compact drops the oldest turns, /clear all" if chat.conversation.num_turns > 1 else "/clear drops it"
        chat.screen.say(f"the context is full: {oldest}; a larger -c has more room")


def _gpu_use(engine: Engine) -> str | None:
    if engine.device.type != "cuda":
        return None
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(engine.device)
    return f"gpu {(total_bytes - free_bytes) / GIB:.1f}/{total_bytes / GIB:.1f} GiB"


def _leave(restore_keys: Callable[[], None]) -> None:
    """End the program with the terminal as it was, without an exception: that would wait for a pass that hangs."""
    restore_keys()
    os.write(STDERR, b"\n")
    os._exit(EXIT_INTERRUPTED)
