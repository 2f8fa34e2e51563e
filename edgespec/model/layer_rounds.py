"""Calls that pass a model's layers together, each by its own code: nobody is a layer ahead of the others.

Each call runs in a thread of its own, and one thread runs at any time: it has the turn from a layer until it comes to
the next. So a layer's weights, once there, serve all calls; and a family's own forward, its masks, positions and cache
need no change.
"""

import threading
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
        under_way = [_Turns(call, self._of_thread, device) for call in calls]
        everyone = list(under_way)
        number = 0
        try:
            while under_way:
                if number:  # before the first all calls come to the first layer
                    on_round(number - 1)
                for turns in under_way:
                    turns.give()
                under_way = [turns for turns in under_way if not turns.is_done]
                number += 1
        finally:
            for turns in everyone:
                turns.leave()
        return [turns.result for turns in everyone]


class _Turns(Generic[Result]):
    """The turns of one call, between the thread of the pass and the call's own."""

    def __init__(self, call: Callable[[], Result], of_thread: threading.local, device: torch.device) -> None:
        self.is_done = False
        self._call, self._of_thread, self._device = call, of_thread, device
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
        """Let the call go on to its next layer, or to its end; raises what it raised."""
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
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
            self._found.append(self._call())
        except _LeftError:
            pass
        except BaseException as error:  # raised in the thread of the pass
            self._error = error
        finally:
            self.is_done = True
            self._back.release()
