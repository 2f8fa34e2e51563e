"""What a part found, and the words for a part's end."""

from dataclasses import dataclass
from typing import Any

PASS, FAIL, SKIPPED = "PASS", "FAIL", "SKIPPED"  # by the part itself
CRASHED, HUNG = "CRASHED", "HUNG"  # by the process that waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part's own verdict."""

    verdict: str
    found: Any = None  # numbers, for the report
    reason: str = ""  # a line: why it was skipped, or failed


def judged(ok: bool, found: Any, reason: str = "") -> Finding:
    """Return that a check held, or that it did not."""
    return Finding(verdict=PASS if ok else FAIL, found=found, reason="" if ok else reason)


def skipped(reason: str, found: Any = None) -> Finding:
    """Return that there was nothing to check, and why."""
    return Finding(verdict=SKIPPED, found=found, reason=reason)
