"""A row's answers, one turn after the other, each with the answers before it in its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edgespec.cli.generate.requests import EncodeTurn, Request
from edgespec.engine import Engine
from edgespec.pair.pair import ModelPair
from edgespec.text.chat_template import Message
from edgespec.text.handle import OnPrefill
from edgespec.text.results import GenerationResult, TextChunk


def answer_turns(
    engine: Engine,
    request: Request,
    encode: EncodeTurn,
    *,
    on_prefill: OnPrefill,
    on_chunk: Callable[[TextChunk], None],
) -> Iterator[GenerationResult]:
    """Yield each turn's answer when it is finished; raises EdgespecError, or KeyboardInterrupt when it was cancelled.

    A turn keeps the keys and values of the turns before it; a row keeps none of another row, so that its text does not
    depend on what was run before.
    """
    answers: tuple[Message, ...] = ()
    for turn in range(request.row.num_turns):
        result = engine.generate(
            encode(request.row, answers) if turn else request.ids,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            seed=request.seed,
            name=request.row.id,  # and not its place in the file, so that other rows change nothing
            stop=request.stop,
            reuse=turn > 0,
            on_prefill=on_prefill,
            on_chunk=on_chunk,
        )
        if result.finish_reason == "interrupted":
            raise KeyboardInterrupt
        answers += (_answer(engine.pair, result),)
        yield result


def _answer(pair: ModelPair, result: GenerationResult) -> Message:
    """Return the answer as the next turn reads it: its very tokens, but without a stop token.

    Where a stop string cut the text, the text is encoded anew.
    """
    ids = result.token_ids
    if ids and ids[-1] in pair.stop_tokens:
        ids = ids[:-1]
    elif result.finish_reason == "stop":
        ids = ()
    return Message(role="assistant", content=result.text, token_ids=ids)
