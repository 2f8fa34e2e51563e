"""Ctrl-C while modules are imported, and termination of a server."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from edgespec.cli.ctrl_c import Terminated, ending_by, without_collections

# What Ctrl-C does when torch is about to be imported: an exception in the middle of a C++ import aborts the program.
PROGRAM = """
import gc, os, signal, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(signal.getsignal(signal.SIGINT).__qualname__, gc.isenabled(), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
sys.argv[1:] = {arguments}
from edgespec import cli
cli.main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "-p", "x"], ["estimate"], ["profile"], ["bench"], ["models"], ["doctor"], ["generate", "-p", "x"],
        ["train", "head", "--data", __file__, "-o", "head"], ["train", "acceptance", "--prompts", __file__, "-o", "a"],
        ["train", "router", "-md", "built-in-head", "--features", "features", "-o", "routed"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_ctrl_c_ends_the_program_at_once_while_torch_is_imported(arguments: list[str]) -> None:
    """Nor are cycles looked for meanwhile."""
    command = [sys.executable, "-c", PROGRAM.format(arguments=arguments)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.stdout.splitlines()[-1:] == ["leaving_at_once.<locals>.press False"], outcome.stderr


def test_termination_within_a_task_of_an_event_loop_ends_the_program() -> None:
    counts: list[int] = []

    async def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def serve() -> None:
        await asyncio.gather(asyncio.create_task(terminate()), return_exceptions=True)

    def raise_at_once(number: int, _frame: object) -> None:
        raise Terminated(number)

    before = signal.signal(signal.SIGTERM, raise_at_once)
    try:
        with pytest.raises(Terminated), ending_by(counts.append):
            asyncio.run(serve())
        assert signal.getsignal(signal.SIGTERM) is raise_at_once
    finally:
        signal.signal(signal.SIGTERM, before)
    assert counts == [1]


def test_what_is_imported_is_not_looked_through_for_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    with without_collections():  # torch is imported already
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with suppress(KeyboardInterrupt), without_collections():
            assert not gc.isenabled()
            raise KeyboardInterrupt
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
