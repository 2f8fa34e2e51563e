"""Calls that pass a model's layers together, each by its own code: nobody is a layer ahead of the others.

Each call runs in a thread of its own, and one thread runs at any time, or a few: they have the turn from a layer until
they come to the next. So a layer's weights, once there, serve all calls; and a family's own forward, its masks,
positions and cache need no change.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class _LeftError(BaseException):
    """Raised in a call's thread to leave its forward: no `except Exception` of a family's code may take it."""


class LayerRounds:
    """The rounds of a pass: in each, every call goes on by a layer."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def arrive(self) -> bool:
        """Wait for the next round, where this thread runs one of several calls; return whether it does."""
        turns: _Turns[object] | None = getattr(self._of_thread, "turns", None)
        if turns is not None:
            turns.wait()
        return turns is not None

    def run(
        self,
        calls: Sequence[Callable[[], Result]],
        *,
        device: torch.device,
        on_round: Callable[[int], None] = lambda number: None,
    ) -> list[Result]:
        """Return the results of all calls; `on_round` is called with each round's number before it.

        What a call raises, or `on_round`, or an interrupt, ends all of them: no thread is left.
        """
        return self.begin(calls, device=device, on_round=on_round).finish()

    def begin(
        self,
        calls: Sequence[Callable[[], Result]],
        *,
        device: torch.device,
        on_round: Callable[[int], None] = lambda number: None,
        on_turn: Callable[[], None] = lambda: None,
        at_once: int = 1,
        num_threads: int | None = None,
    ) -> "CallsUnderWay[Result]":
        """Return the calls, none of which has begun: their rounds pass as far as somebody lets them.

        So many of them have the turn `at_once`, and `on_turn` is called after it; each computes with `num_threads` of
        torch's, by default all.
        """
        turns = [_Turns(call, self._of_thread, device, num_threads) for call in calls]
        return CallsUnderWay(turns, on_round, on_turn, at_once)


class CallsUnderWay(Generic[Result]):
    """Calls that go on by a layer of one of them, or of a few, at a time."""

    def __init__(
        self,
        turns: Sequence["_Turns[Result]"],
        on_round: Callable[[int], None],
        on_turn: Callable[[], None],
        at_once: int,
    ) -> None:
        self._everyone, self._on_round, self._on_turn, self._at_once = turns, on_round, on_turn, at_once
        self._round = deque(turns)  # who has the turn next, in this round
        self._num_rounds = 0

    def go_on(self) -> bool:
        """Let the next calls go on to their next layer, and return whether any goes on; raises what one raised."""
        if not self._round:
            self._round.extend(turns for turns in self._everyone if not turns.is_done)
            if not self._round:
                return False
            self._on_round(self._num_rounds)  # before the first all calls come to the first layer
            self._num_rounds += 1
        taking = [self._round.popleft() for _ in range(min(self._at_once, len(self._round)))]
        num_threads = torch.get_num_threads()
        try:
            for turns in taking:
                turns.give()
            for turns in taking:
                turns.take_back()
        finally:
            torch.set_num_threads(num_threads)  # theirs would be that of all threads to come
        self._on_turn()
        return True

    def finish(self) -> list[Result]:
        """Let all calls go on to their ends, and return what they returned; what is raised ends all of them."""
        try:
            while self.go_on():
                pass
        finally:
            self.leave()
        return self.results

    def leave(self) -> None:
        """End the calls where they are; no thread is left."""
        for turns in self._everyone:
            turns.leave()

    @property
    def results(self) -> list[Result]:
        """What the calls returned, once none goes on."""
        return [turns.result for turns in self._everyone]


class _Turns(Generic[Result]):
    """The turns of one call, between the thread of the pass and the call's own."""

    def __init__(
        self, call: Callable[[], Result], of_thread: threading.local, device: torch.device, num_threads: int | None
    ) -> None:
        self.is_done = False
        self._call, self._of_thread, self._device, self._num_threads = call, of_thread, device, num_threads
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_left = False
        self._found: list[Result] = []
        self._error: BaseException | None = None
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._work), name="edgespec-text", daemon=True)

    @property
    def result(self) -> Result:
        """What the call returned."""
        return self._found[0]

    def give(self) -> None:
        """Let the call go on to its next layer, or to its end."""
        if not self._thread.ident:
            self._thread.start()
        self._go.release()

    def take_back(self) -> None:
        """Wait until the call is there; raises what it raised."""
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Give the turn back, in the call's own thread, and wait for the next."""
        self._back.release()
        self._go.acquire()
        if self._is_left:
            raise _LeftError

    def leave(self) -> None:
        """End the call where it is, and its thread; nothing happens after its end."""
        self._is_left = True
        self._go.release()
        if self._thread.ident:
            self._thread.join()

    @torch.no_grad()
    def _work(self) -> None:
        self._of_thread.turns = self
        try:
            self._go.acquire()
            if self._is_left:
                return
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has a current device of its own
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            self._found.append(self._call())
        except _LeftError:
            pass
        except BaseException as error:  # raised in the thread of the pass
            self._error = error
        finally:
            self.is_done = True
            self._back.release()
