"""One answer: shown as it is verified, stopped by Ctrl-C, what it took in a line below it; and what a session took.

Ctrl-C sets flags that are looked at between passes and layers, so that nothing is torn: the first ends the answer
after its pass, the second within it, the third ends the program.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edgespec.chat.tools import shown_parts
from edgespec.cli.chat.state import Chat, Turn
from edgespec.cli.console import counted
from edgespec.cli.ctrl_c import EXIT_INTERRUPTED, STDERR, cancelling, stopping_notice
from edgespec.cli.faults import memory_error
from edgespec.cli.open_engine import engine_trees_in_words
from edgespec.errors import EdgespecError, is_out_of_memory

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.text.handle import OnPrefill
    from edgespec.text.results import GenerationResult, TextChunk

GIB = 1 << 30
MAX_LENGTHS_SHOWN = 12
MIN_RATED = 16  # tokens; a rate of fewer says nothing
NOTICES = (stopping_notice(line_width=None), b"\nabandoning the pass (Ctrl-C again: leave the program)\n")
Ask = Callable[["OnPrefill"], Generator["TextChunk", None, None]]


def answer(chat: Chat, ask: Ask, *, nothing: str = "the message is not kept (Up brings it back)") -> bool:
    """Show what `ask` yields, and return whether there was an answer, whole or not; where not, say that and `nothing`.

    Raises EdgespecError.
    """
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
                reader = conversation.reader
                screen.answer(chunk.text if reader is None else shown_parts(reader.feed(chunk.text)))
                if num_pressed():  # also where the key came before there was anything to cancel
                    chat.engine.cancel()
            if conversation.reader is not None:
                screen.answer(shown_parts(conversation.reader.end()))
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
        screen.note(f"nothing was answered; {nothing}")
    if failure is not None:
        raise failure
    return result is not None and bool(result.steps)


def give_result(chat: Chat, text: str) -> None:
    """Give the result of a call, and show what the model says once all are there; raises EdgespecError."""
    conversation = chat.conversation
    before = conversation.messages
    conversation.give_result(chat.with_attachments(text))
    try:
        if not conversation.pending_calls:
            answer(chat, lambda on_prefill: conversation.go_on(on_prefill=on_prefill))
    finally:
        if not conversation.pending_calls and conversation.messages[-1].role == "tool":
            conversation.messages = before  # nothing was answered, and the result is asked for again
        else:
            chat.attachments.clear()


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


def footer(result: GenerationResult, *, max_context: int, trees: str | None, gpu: str | None, width: int) -> str:
    """Return tokens, rates and room in one line; parts that do not fit the width are left out, the last first."""
    usage, rate = result.usage, result.decode_tokens_per_s
    new = usage.prompt_tokens - usage.cached_tokens
    read_rate = f" {new / result.prefill_s:.0f} tok/s" if new >= MIN_RATED and result.prefill_s else ""
    kept = f" ({usage.cached_tokens} kept)" if usage.cached_tokens else ""
    parts = [
        f"{usage.completion_tokens} tok",
        f"{rate:.1f} tok/s" if rate else None,
        f"{result.tokens_per_pass:.1f} tok/pass" if result.tokens_per_pass else None,
        f"ctx {usage.total_tokens}/{max_context}",
        f"prefill {new} tok{kept}{read_rate}",
        _mean_size(result) if trees else None,
        _sources(result),
        f"first {result.time_to_first_token_s:.1f}s",
        gpu,
        trees,
    ]
    line = ""
    for part in parts:
        longer = " · ".join(filter(None, (line, part)))
        if line and len(longer) > width:
            break
        line = longer
    return line


def _sources(result: GenerationResult) -> str | None:
    """Return where accepted tokens came from; None where nothing was looked up."""
    looked_up = sum(step.num_looked_up for step in result.passes)
    from_draft = sum(step.num_accepted for step in result.passes) - looked_up
    return f"{from_draft} from the draft, {looked_up} looked up" if looked_up else None


def _mean_size(result: GenerationResult) -> str | None:
    """Return the size of tuned trees; the reason follows at the line's end, where it fits."""
    sizes = [step.num_drafted for step in result.passes]
    return f"{sum(sizes) / len(sizes):.1f} nodes (tuned)" if sizes else None


def session_report(turns: Sequence[Turn], *, pass_bytes: int, expert_bytes: int) -> Iterable[str]:
    """Yield the totals of all answers: lengths of passes, where the time went, and speculation against none.

    Each pass moves `pass_bytes`, and the experts that rows needed moved `expert_bytes` in all.
    """
    if not turns:
        yield "no answers yet"
        return
    results = [turn.result for turn in turns]
    steps = [step for result in results for step in result.steps]
    passes = [step for result in results for step in result.passes]
    made = sum(result.usage.completion_tokens for result in results)
    read = sum(result.usage.prompt_tokens - result.usage.cached_tokens for result in results)
    kept = sum(result.usage.cached_tokens for result in results)
    count = counted(len(turns), "answer")
    yield f"{count} · {made} tok · read {read} tok, {kept} kept · {sum(r.total_s for r in results):.1f} s"
    if passes:
        lengths = Counter(len(step.tokens) for step in passes)
        shown = ", ".join(f"{length}: {count}" for length, count in sorted(lengths.items())[:MAX_LENGTHS_SHOWN])
        more = ", ..." if len(lengths) > MAX_LENGTHS_SHOWN else ""
        mean = sum(len(step.tokens) for step in passes) / len(passes)
        yield f"{counted(len(passes), 'pass')} · {mean:.2f} tok/pass · passes by tokens: {shown}{more}"
    draft_s, verify_s, rest_s = (
        sum(getattr(step, name) for step in steps) for name in ("grow_s", "target_s", "rest_s")
    )
    whole_s = draft_s + verify_s + rest_s or 1.0
    yield (
        f"time: draft {draft_s:.1f} s ({draft_s / whole_s:.0%}) · target {verify_s:.1f} s ({verify_s / whole_s:.0%}) · "
        f"rest {rest_s:.1f} s"
    )
    total = pass_bytes * len(steps) + expert_bytes
    if total and steps:
        rate = total / GIB / (verify_s or 1.0)
        yield f"streamed {total / GIB:.2f} GiB in {counted(len(steps), 'pass')} · {rate:.2f} GiB/s"
    rates = {spec: _rate(turn.result for turn in turns if turn.spec == spec) for spec in ("off", "tree", "chain")}
    known = {spec: rate for spec, rate in rates.items() if rate}
    yield "decoding: " + " · ".join(f"{spec} {rate:.1f} tok/s" for spec, rate in known.items())
    plain = known.pop("off", None)
    if plain and known:
        yield "against /spec off: " + " · ".join(f"{spec} {rate / plain:.2f} times" for spec, rate in known.items())
    elif known:
        yield "gain: unknown; an answer with /spec off would tell"


def _rate(results: Iterable[GenerationResult]) -> float | None:
    """Return the tokens a second after the first token, of all results together."""
    tokens, seconds = 0, 0.0
    for result in results:
        if result.decode_tokens_per_s:
            tokens += len(result.token_ids) - 1
            seconds += result.total_s - result.time_to_first_token_s
    return tokens / seconds if seconds > 0 else None
