"""An engine under everything that may be done with it, in any order and by several threads: no wrong token, no hang.

`EDGESPEC_STATE_RUNS` sets the number of runs; a long check takes 2000.
"""

import ctypes
import os
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edgespec import EdgespecError, Engine, MemoryLimits, TreeSettings
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from tests.interrupts import interrupted_at

NUM_RUNS = int(os.environ.get("EDGESPEC_STATE_RUNS", "12"))
MAX_WAIT_S = 60.0  # for a thread: whoever waits longer hangs
TREES = {
    "coupled": TreeSettings(size=6),
    "sampled": TreeSettings(policy="dyspec", draw="sampled", size=6),
    "tuned": None,
    "plain": TreeSettings(policy="none"),
}
NUM_REQUESTS = 6


class CallbackError(Exception):
    """What a callback of a text raises."""


@dataclass
class Waiter:
    """A thread that iterates over a text, or waits for its end."""

    handle: TextHandle
    iterates: bool
    tokens: list[int] = field(default_factory=list)
    error: BaseException | None = None
    is_interrupted: bool = False

    def start(self) -> None:
        """Begin to wait."""
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def interrupt(self) -> None:
        """Raise an exception in the thread, wherever it is."""
        self.is_interrupted = True
        ident = self.thread.ident
        assert ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt))

    def _wait(self) -> None:
        try:
            if self.iterates:
                for chunk in self.handle:
                    self.tokens.extend(chunk.token_ids)
            else:
                self.tokens.extend(self.handle.result().token_ids)
        except BaseException as error:
            self.error = error


def requests_of(engine: Engine) -> list[TextRequest]:
    """Texts of unlike prompts, lengths, sampling and penalties; the last two have one prompt."""
    found = []
    for number in range(NUM_REQUESTS):
        options: dict[str, Any] = {
            "temperature": (0.9, 0.0)[number == 2], "frequency_penalty": 0.4 * (number % 2), "ignore_eos": True
        }  # fmt: skip
        prompt = [7 * min(number, 4) + place for place in range(5 + 6 * min(number, 4))]
        found.append(engine.request(prompt, max_new_tokens=6 + 3 * number, seed=number, name=str(number), **options))
    return found


class Engines:
    """The engines that runs share, by the kind of their trees, and what each text is alone."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._folders = target, draft
        self._open: dict[tuple[str, bool], Engine] = {}
        self.expected: dict[str, list[list[int]]] = {}
        for kind in TREES:
            engine = self.open(kind, streams=False)
            texts = [engine.submit(request, keeps=False) for request in requests_of(engine)]
            self.expected[kind] = [list(handle.result().token_ids) for handle in texts]

    def open(self, kind: str, *, streams: bool) -> Engine:
        """Return the engine of a kind; the one that was closed is replaced by another."""
        if (kind, streams) not in self._open:
            limits = MemoryLimits(max_resident_layers=0 if streams else None)
            options: dict[str, Any] = {"limits": limits, "context_tokens": 96, "parallel": 3, "self_check": False}
            target, draft = self._folders
            self._open[kind, streams] = Engine.from_pretrained(target, draft=draft, tree=TREES[kind], **options)
        return self._open[kind, streams]

    def close(self, kind: str, *, streams: bool) -> None:
        """Close the engine of a kind."""
        self._open.pop((kind, streams)).close()


class EngineStates(RuleBasedStateMachine):
    """An engine, texts that were asked of it, and threads that wait for them."""

    engines: Engines
    num_runs = 0
    handles = Bundle("handles")
    waiters = Bundle("waiters")

    @initialize(kind=st.sampled_from(sorted(TREES)), streams=st.booleans())
    def load(self, kind: str, streams: bool) -> None:
        EngineStates.num_runs += 1
        self.kind, self.streams = kind, streams
        self.texts: list[tuple[TextHandle, list[int], type[Exception] | None]] = []
        self.threads: list[Waiter] = []
        self.closed: set[TextHandle] = set()  # whose engine was closed
        self.engine = self.engines.open(kind, streams=streams)
        self.requests = requests_of(self.engine)

    def _note(self, handle: TextHandle, number: int, error: type[Exception] | None = None) -> TextHandle:
        self.texts.append((handle, self.engines.expected[self.kind][number], error))
        return handle

    @rule(target=handles, number=st.integers(0, NUM_REQUESTS - 1), reuse=st.booleans())
    def submit(self, number: int, reuse: bool) -> TextHandle:
        return self._note(self.engine.submit(self.requests[number], reuse=reuse), number)

    @rule(target=handles, fault=st.sampled_from(["ids", "callback"]))
    def submit_what_fails(self, fault: str) -> TextHandle:
        def fail(_done: int, _of: int) -> None:
            raise CallbackError

        if fault == "callback":
            return self._note(self.engine.submit(self.requests[1], on_prefill=fail), 1, CallbackError)
        return self._note(self.engine.submit(replace(self.requests[0], ids=[9, 999])), 0, EdgespecError)

    @rule(target=waiters, handle=handles, iterates=st.booleans())
    def wait_in_a_thread(self, handle: TextHandle, iterates: bool) -> Waiter:
        waiter = Waiter(handle, iterates)
        self.threads.append(waiter)
        waiter.start()
        return waiter

    @rule(waiter=waiters, after_s=st.floats(0, 0.02))
    def interrupt_a_thread(self, waiter: Waiter, after_s: float) -> None:
        time.sleep(after_s)
        waiter.interrupt()

    @rule(waiter=consumes(waiters))
    def join(self, waiter: Waiter) -> None:
        waiter.thread.join(MAX_WAIT_S)
        assert not waiter.thread.is_alive(), "a thread hangs"

    @rule(handle=handles)
    def result(self, handle: TextHandle) -> None:
        with suppress(EdgespecError, CallbackError):
            handle.result()

    @rule(handle=handles, count=st.integers(1, 3))
    def iterate_a_little(self, handle: TextHandle, count: int) -> None:
        """Closing the iterator ends the text."""
        with suppress(EdgespecError, CallbackError), closing(iter(handle)) as chunks:
            for _ in zip(range(count), chunks, strict=False):
                pass

    @rule(handle=handles, place=st.integers(1, 6000))
    def wait_interrupted(self, handle: TextHandle, place: int) -> None:
        with interrupted_at(place):
            self.result(handle)

    @rule(count=st.integers(1, 3))
    def advance(self, count: int) -> None:
        for _ in range(count):
            self.engine.advance()

    @rule(handle=handles)
    def cancel(self, handle: TextHandle) -> None:
        handle.cancel()

    @rule(abandon=st.booleans())
    def cancel_all(self, abandon: bool) -> None:
        self.engine.cancel(abandon=abandon)

    @precondition(lambda self: len(self.texts) > 4)
    @rule()
    def close_and_open_another(self) -> None:
        self.engines.close(self.kind, streams=self.streams)
        self.closed.update(handle for handle, _, _ in self.texts)
        self.engine = self.engines.open(self.kind, streams=self.streams)
        self.requests = requests_of(self.engine)

    def teardown(self) -> None:
        """Every text is whole, or the beginning of the whole one where something has ended it."""
        if not hasattr(self, "texts"):
            return
        for waiter in self.threads:
            waiter.thread.join(MAX_WAIT_S)
            assert not waiter.thread.is_alive(), "a thread hangs"
        for handle, expected, error in self.texts:
            self.result(handle)
            self._check(handle, expected, error)
        for waiter in self.threads:
            whole = list(waiter.handle.added)
            is_left = waiter.is_interrupted or waiter.handle.error is not None
            assert waiter.tokens == (whole[: len(waiter.tokens)] if is_left else whole), waiter.error
        assert self.engine.advance() == 0

    def _check(self, handle: TextHandle, expected: list[int], error: type[Exception] | None) -> None:
        found = list(handle.added)
        assert found == expected[: len(found)]
        is_closed = isinstance(handle.error, EdgespecError) and handle.error.code == "E_ENGINE"
        if handle.error is None:
            assert handle.is_cancelled or (found == expected and error is None)
        else:
            assert (is_closed and handle in self.closed) or (error is not None and isinstance(handle.error, error))


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupted while garbage is collected
def test_an_engine_survives_everything_in_any_order(pair_folders: tuple[Path, Path]) -> None:
    EngineStates.engines = Engines(*pair_folders)
    run_state_machine_as_test(
        EngineStates,
        settings=settings(
            max_examples=NUM_RUNS,
            stateful_step_count=14,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert EngineStates.num_runs >= NUM_RUNS
