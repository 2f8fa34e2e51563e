"""One worker of a run on many: it has the pair on its machine, and makes records of rows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from edgespec import __version__
from edgespec.cli.console import Console
from edgespec.cli.generate.batched import RowsTogether, Run
from edgespec.cli.generate.options import PairOptions
from edgespec.cli.generate.prepare import decided_for_rows, pair_sizes, place_run
from edgespec.cli.generate.record_config import record_config
from edgespec.cli.generate.records import RowRecord, Totals, run_fields
from edgespec.cli.generate.requests import NeededTokens, Request, RunSettings, turn_encoder
from edgespec.cli.open_engine import say_setup
from edgespec.cli.open_pair import open_pair_for
from edgespec.distributed.worker import Answer, Exchange, WorkerInfo

if TYPE_CHECKING:
    from edgespec.placement.pair_setup import PairSetup

RowAnswer: TypeAlias = tuple[dict[str, Any], Totals]  # a row's record, and the sums over its answers


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """How a worker opens its pair, which is what one process would do there."""

    pair_options: PairOptions
    settings: RunSettings
    needed: NeededTokens  # of this worker's share of the rows

    def open(self, *, num_beside: int) -> RowWorker:
        """Open the pair in this machine's memory, beside this number of others; raises EdgespecError."""
        return RowWorker(self, num_beside=num_beside)


class RowWorker:
    """A pair on its machine. It says what it would run with, loads, and answers rows."""

    def __init__(self, plan: RowPlan, *, num_beside: int) -> None:
        self._plan, self._console = plan, _NotingConsole()
        self._waiting: deque[Request] = deque()
        self._numbers: dict[str, int] = {}  # of jobs, by their rows
        self._ended_tokens, self._working_s = 0, 0.0
        options, machine = plan.pair_options, plan.pair_options.machine
        machine = replace(machine, max_cpu_mem=_max_cpu_bytes(machine.max_cpu_mem, num_beside))
        options = replace(options, machine=machine)
        pair = decided_for_rows(open_pair_for(self._console, options), options, plan.settings, plan.needed)
        sizes = pair_sizes(pair, machine, plan.needed)
        setup = place_run(sizes, plan.settings, options, plan.needed)
        say_setup(self._console, setup, machine)
        self._setup: PairSetup | None = setup
        self._info = _info(setup, plan.settings, self._console.taken())

    def info(self) -> WorkerInfo:
        """Say what it would run with."""
        return self._info

    def load(self, settings: Mapping[str, Any]) -> None:
        """Read the weights; records say that they were made with these settings. Raises EdgespecError."""
        from edgespec.engine import Engine

        assert self._setup is not None
        setup, self._setup = self._setup, None  # it knows the weights
        engine = Engine(
            setup,
            self_check=self._plan.pair_options.self_check,
            draft_check=self._plan.pair_options.draft_check == "auto",
        )
        self._run = Run(
            console=self._console,
            engine=engine,
            predicted_per_s=setup.predicted_per_s,
            fields=run_fields(engine.pair, engine.run_config, dict(settings)),
            encode=turn_encoder(engine.pair, self._plan.settings),
        )
        self._rows = RowsTogether(self._run, lambda: self._waiting.popleft() if self._waiting else None)

    def exchange(self, jobs: Sequence[tuple[int, Request]], wait_s: float) -> Exchange[RowAnswer]:
        """Take rows, make passes until some have ended, or for a moment, and return their records."""
        started = time.perf_counter()
        for number, request in jobs:
            self._numbers[request.row.id] = number
            self._waiting.append(request)
        answers: list[Answer[RowAnswer]] = []
        self._goes_on = True
        while self._goes_on and not answers and time.perf_counter() - started < wait_s:
            answers = [self._answer(ended) for ended in self._step()]
        self._working_s += time.perf_counter() - started
        under_way = {row.request.row.id: row.num_tokens for row in self._rows.rows if row.is_under_way}
        return Exchange(
            answers=answers,
            under_way=under_way,
            num_tokens=self._ended_tokens + sum(under_way.values()),
            working_s=self._working_s,
            notes=self._console.taken(),
        )

    def _step(self) -> Generator[RowRecord, None, None]:
        self._goes_on = yield from self._rows.step()

    def _answer(self, ended: RowRecord) -> Answer[RowAnswer]:
        self._ended_tokens += ended.totals.tokens
        return Answer(
            number=self._numbers.pop(ended.request.row.id),
            value=(ended.record, ended.totals),
            failed=ended.failed,
            may_succeed_elsewhere=ended.request.fault is None,
        )


class _NotingConsole(Console):
    """Keeps messages for the machine where the user reads them."""

    def __init__(self) -> None:
        super().__init__(quiet=False, verbose=False)
        self.is_terminal = False
        self._lines: list[str] = []

    def _write(self, text: str, *, is_drawn: bool = False) -> None:
        self._lines.append(text)

    def taken(self) -> list[str]:
        """Return the messages since the last call."""
        lines, self._lines = self._lines, []
        return lines


def _info(setup: PairSetup, settings: RunSettings, lines: Sequence[str]) -> WorkerInfo:
    import torch
    import transformers

    config = record_config(setup, settings)
    return WorkerInfo(
        settings=config,
        versions={
            "edgespec": __version__,
            "torch": torch.__version__.partition("+")[0],
            "transformers": transformers.__version__,
        },
        num_texts=setup.run_config.num_texts,
        shared=run_fields(setup.pair, setup.run_config, config),
        lines=lines,
    )


def _max_cpu_bytes(max_bytes: int | None, num_beside: int) -> int | None:
    """Return a worker's part of the RAM that is free now, unless the user said how much each may have."""
    if not num_beside or max_bytes is not None:
        return max_bytes
    from edgespec.placement.place import usable_host_bytes

    return usable_host_bytes() // (num_beside + 1)
