"""The passes of a mixture, as they are made: the experts that routers choose, the bytes that are read, the seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from edgespec.model.causal_model import CausalModel
from edgespec.placement import place as placing
from offload.experts.expert_placement import place_on_demand
from offload.pages import MappedFile
from offload.placement import Placement
from profiles.measure import drop_page_cache
from scripts.situations import disk_read_bytes, wait_for_link

ROUTERS = ("gate", "router")  # what families call the module that chooses


@dataclass(slots=True)
class Log:
    """What the passes of a run asked for and took; the first is the prompts' own."""

    files: list[Path]  # whose pages are dropped before every pass; none where memory may keep them
    least_bytes_per_s: float = 0.0  # a pass lasts as long as its reads at this rate; 0: as long as it does
    rows: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)  # of all threads, whatever else the machine does
    distinct: list[int] = field(default_factory=list)  # experts, of all layers
    began: float = 0.0  # when the prompts were read
    ended: float = 0.0
    began_bytes: int = 0
    ended_bytes: int = 0
    dropped_s: float = 0.0  # since the prompts were read

    def run(self, rows: int, forward: Callable[[], Any]) -> Any:
        """Make one pass, and note it."""
        started = time.perf_counter()
        if self.files and not drop_page_cache(self.files):
            raise SystemExit("this system cannot drop its page cache: use --modes resident")
        dropped = time.perf_counter()
        read_bytes, used_s = disk_read_bytes(), time.process_time()
        self.distinct.append(0)
        found = forward()
        if self.least_bytes_per_s:
            wait_for_link(disk_read_bytes() - read_bytes, dropped, self.least_bytes_per_s)
        self.ended, self.ended_bytes = time.perf_counter(), disk_read_bytes()
        if self.rows:
            self.dropped_s += dropped - started
        else:
            self.began, self.began_bytes = self.ended, self.ended_bytes
        self.rows.append(rows)
        self.seconds.append(self.ended - dropped)
        self.processor_s.append(time.process_time() - used_s)
        return found

    def count_experts(self, model: nn.Module) -> None:
        """Note the distinct experts that every router of the model chooses."""

        def chosen(_module: nn.Module, _arguments: Any, output: Any) -> None:
            experts = choices_in(output)
            if experts is not None and self.distinct:
                self.distinct[-1] += int(experts.unique().numel())

        for router in routers_of(model):
            router.register_forward_hook(chosen)


def routers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The routers of all layers that have one, in their order."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ROUTERS:
            yield module


def choices_in(output: Any) -> Tensor | None:
    """The experts [rows, chosen] in what a router returns; None where it names none."""
    parts = output if isinstance(output, tuple) else ()
    return next((part for part in parts if not part.is_floating_point()), None)


@contextmanager
def logged(model: CausalModel, log: Log) -> Iterator[None]:
    """Within this block, passes of the model are noted."""
    run = CausalModel._run

    def noted(self: CausalModel, parts: Any, chunks: Any) -> Any:
        if self is not model:
            return run(self, parts, chunks)
        return log.run(sum(part.count for part in parts), lambda: run(self, parts, chunks))

    CausalModel._run = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        CausalModel._run = run  # type: ignore[method-assign]


def keep_one_expert() -> None:
    """Let no memory keep experts: each has the place of the one before it."""

    def place(*records: Any, **memory: Any) -> Placement:
        found = place_on_demand(*records, **memory)
        assert found.experts is not None
        return replace(found, experts=replace(found.experts, num_kept=1))

    placing.place_on_demand = place


def slow_reads(bytes_per_s: float) -> None:
    """Let every read of mapped pages take its time on one disk, whoever reads."""
    populate, disk = MappedFile.populate, threading.Lock()

    def slow(self: MappedFile, start: int, end: int) -> None:
        with disk:
            started = time.perf_counter()
            populate(self, start, end)
            wait_for_link(end - start, started, bytes_per_s)

    MappedFile.populate = slow  # type: ignore[method-assign]
