"""A row's answers, one turn after the other, each with the answers before it in its context."""

from __future__ import annotations

from edgespec.cli.generate.requests import EncodeTurn, Request
from edgespec.engine import Engine
from edgespec.text.chat_template import Message
from edgespec.text.handle import OnPrefill, TextHandle
from edgespec.text.results import GenerationResult


class RowAnswers:
    """A row under way.

    A turn keeps the keys and values of the turns before it; a row keeps none of another row, so that its text does not
    depend on what was run before.
    """

    def __init__(
        self, engine: Engine, request: Request, encode: EncodeTurn, *, on_prefill: OnPrefill | None = None
    ) -> None:
        self.request = request
        self.results: list[GenerationResult] = []  # of the turns that are answered
        self._engine, self._encode, self._on_prefill = engine, encode, on_prefill
        self._answers: tuple[Message, ...] = ()
        self._handle: TextHandle | None = None  # of the turn under way

    @property
    def is_done(self) -> bool:
        """Return whether all turns are answered."""
        return len(self.results) == self.request.row.num_turns

    @property
    def is_under_way(self) -> bool:
        """Return whether the turn that was asked for last has begun, or has ended."""
        return self._handle is not None and self._handle.state != "waiting"

    @property
    def is_read(self) -> bool:
        """Return whether nothing of that turn's prompt is left to read."""
        return self._handle is not None and bool(self._handle.added or self._handle.is_done)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all answers so far."""
        now = 0 if self._handle is None else len(self._handle.added)
        return now + sum(len(result.token_ids) for result in self.results)

    def next_turn(self) -> TextHandle:
        """Ask for the next turn's answer; raises EdgespecError where the context has no room for it."""
        request, turn = self.request, len(self.results)
        if request.fault is not None:
            raise request.fault
        text_request = self._engine.request(
            self._encode(request.row, self._answers) if turn else request.ids,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            seed=request.seed,
            name=request.row.id,  # and not its place in the file, so that other rows change nothing
            stop=request.stop,
            skip_special_tokens=request.skip_special_tokens,
            grammar=request.grammar,
            logprobs=request.logprobs,
            **request.token_options,
        )
        is_last = turn == request.row.num_turns - 1
        self._handle = self._engine.submit(text_request, reuse=turn > 0, keeps=not is_last, on_prefill=self._on_prefill)
        return self._handle

    @property
    def _ends(self) -> frozenset[int]:
        """Return the tokens that end an answer and are no part of it."""
        return self._engine.pair.stop_tokens | set(self.request.token_options.get("eos_token_id", ()))

    def take(self, handle: TextHandle) -> None:
        """Take a turn's answer; raises what ended it, or KeyboardInterrupt when it was cancelled."""
        result = handle.result()
        if result.finish_reason == "interrupted":
            raise KeyboardInterrupt
        self._answers += (_answer(self._ends, result),)
        self.results.append(result)
        self._handle = None


def _answer(ends: frozenset[int], result: GenerationResult) -> Message:
    """Return the answer as the next turn reads it: its very tokens, but without a stop token.

    Where a stop string cut the text, the text is encoded anew.
    """
    ids = result.token_ids
    if ids and ids[-1] in ends:
        ids = ids[:-1]
    elif result.finish_reason == "stop":
        ids = ()
    return Message(role="assistant", content=result.text, token_ids=ids)
