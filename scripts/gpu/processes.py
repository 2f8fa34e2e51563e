"""A part in a process of its own: it is waited for so long, and what becomes of it is a verdict.

The process writes its finding to a file as JSON, and ends with 0. One that ends otherwise has CRASHED, whatever it
wrote before; one that does not end is HUNG, and is killed with what it started.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.gpu.finding import CRASHED, FAIL, HUNG, PASS, SKIPPED

ROOT = Path(__file__).parents[2]
OUTPUT_BYTES = 20_000  # of what a process says, the last of which are kept
KILL_S = 10.0  # that a killed process is waited for: it may hang in the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a part."""

    verdict: str
    seconds: float
    reason: str = ""
    found: Any = None
    output: str = ""  # the end of what it said, where it did not pass


def run_process(command: Sequence[str], *, limit_s: float) -> Outcome:
    """Run a command that takes the place of its finding as a last argument, and judge its end."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        said, result = Path(folder) / "output", Path(folder) / "finding.json"
        with said.open("wb") as file:
            # The output goes to a file: a pipe would stay open in what the process started.
            process = subprocess.Popen(
                [*command, str(result)], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                start_new_session=sys.platform != "win32",
            )  # fmt: skip
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process)
        verdict, reason, found = _judged(code, result, limit_s)
        output = said.read_bytes()[-OUTPUT_BYTES:].decode(errors="replace")
    seconds = time.monotonic() - started
    return Outcome(
        verdict=verdict, seconds=seconds, reason=reason, found=found, output="" if verdict == PASS else output
    )


def _judged(code: int | None, result: Path, limit_s: float) -> tuple[str, str, Any]:
    """Return the verdict, its reason, and what the process found."""
    finding = {}
    with contextlib.suppress(OSError, ValueError):  # none was written, or not all of it
        finding = json.loads(result.read_text(encoding="utf-8"))
    found = finding.get("found")
    if code is None:
        return HUNG, f"not done after {limit_s:g} s", found
    if code:
        return CRASHED, _end_in_words(code), found
    if finding.get("verdict") not in {PASS, FAIL, SKIPPED}:
        return CRASHED, "it ended without a finding", found
    return finding["verdict"], finding["reason"], found


def _end_in_words(code: int) -> str:
    """Return how a process ended: POSIX gives a signal as a negative code, Windows an exception as a large one."""
    if code >= 0:
        return f"exit code {code}" if code < 256 else f"exit code {code:#x}"
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process, and of what it started."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)
