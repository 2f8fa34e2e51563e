"""A step with the number of threads that the tuner chose for it."""

import time
from collections.abc import Callable

from edgespec.decode.batch import Outcome
from edgespec.machine.torch_threads import torch_threads
from edgespec.tuning.threads import ThreadTuner


def with_threads(step: Callable[[], list[Outcome]], tuner: ThreadTuner | None, *, reads: bool) -> list[Outcome]:
    """Make a step with the tuner's number of threads, and leave torch's as it was.

    `reads` says that prompts are read in it.
    """
    if tuner is None:
        return step()
    # A prompt has many rows: every free core pays.
    with torch_threads(tuner.free if reads else tuner.count):
        started = time.perf_counter()
        outcomes = step()
    if reads:
        tuner.look()
    else:
        num_rows = sum(1 + outcome.step.num_drafted for outcome in outcomes if outcome.step is not None)
        tuner.learn(time.perf_counter() - started, max(1, num_rows))
    return outcomes
