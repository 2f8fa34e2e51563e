"""Everything that needs a CUDA device, in one run of about five minutes; one file tells what came of it.

    python scripts/gpu_check.py              then send gpu_check.json
    python scripts/gpu_check.py --only graphs packed

Each part runs in a process of its own, with a limit of time, and ends as one of

    PASS       what it checks holds
    FAIL       it does not, or Python raised an error: the file has the traceback
    CRASHED    the process died, by a signal or otherwise
    HUNG       it was not done in time and was killed: the file has the stacks of its threads
    SKIPPED    there was nothing to check, and why

and takes no other part with it. The file is written after each part. Exits 1 when a part neither passed nor was
skipped. Without a CUDA device all parts are skipped. `--full` streams larger layers and more rows, and runs the tests
and slow copies too; scripts/gpu/parts.py names the parts and their limits.

Tests without a card find mixed devices (tests/edgespec/test_mixed_devices.py) and copies out of order
(tests/offload/test_device_order.py). They cannot see kernels, and what types and layouts these take; streams, events
and locked memory as the driver has them; the memory that is really taken; graphs that are recorded.

A machine without a network needs wheels brought along, for its own Python: those that pyproject.toml names, and pytest
for the part `tests`.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: Python then looks for modules in scripts/ alone
    sys.path[0] = str(Path(__file__).parents[1])

from scripts.gpu.finding import CRASHED, FAIL, HUNG, PASS, SKIPPED
from scripts.gpu.parts import PARTS
from scripts.gpu.processes import Outcome, run_process

FIRST = "machine"  # always: without a card nothing else is tried
OUTPUT = Path("gpu_check.json")


def command_of(name: str, *, limit_s: float, is_full: bool) -> list[str]:
    """Return the command that checks a part; the place of its finding is to be appended."""
    full = ["--full"] if is_full else []
    return [sys.executable, "-X", "faulthandler", "-m", "scripts.gpu.child", "--limit", f"{limit_s:g}", *full, name]


def run_part(name: str, *, is_full: bool) -> Outcome:
    """Return what became of a part."""
    part = PARTS[name]
    limit_s = part.full_limit_s or part.limit_s if is_full else part.limit_s
    return run_process(command_of(name, limit_s=limit_s, is_full=is_full), limit_s=limit_s)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write all that was found so far; a file that is there stays whole until then."""
    being_written = path.with_suffix(".part")
    being_written.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    being_written.replace(path)


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="run all parts, with larger layers: some 20 minutes")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="run these parts")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the report (default: %(default)s)")
    arguments = parser.parse_args()
    chosen = arguments.only or [name for name, part in PARTS.items() if arguments.full or not part.is_for_full]
    names = [FIRST, *(name for name in PARTS if name in chosen and name != FIRST)]
    report: dict[str, Any] = {"full": arguments.full, "parts": {}}
    has_card = True
    for name in names:
        if has_card:
            outcome = run_part(name, is_full=arguments.full)
        else:
            outcome = Outcome(verdict=SKIPPED, seconds=0.0, reason="no CUDA device")
        has_card &= not (name == FIRST and outcome.verdict == SKIPPED)
        report["parts"][name] = dataclasses.asdict(outcome)
        write_report(report, arguments.output)
        if has_card or name == FIRST:
            why = f": {outcome.reason}" if outcome.reason else ""
            print(f"{outcome.verdict:<8}{name:<12}{outcome.seconds:5.0f} s  {PARTS[name].about}{why}", flush=True)
    if not has_card:
        print("no CUDA device: nothing was checked")
        return 0
    verdicts = [part["verdict"] for part in report["parts"].values()]
    counts = ", ".join(
        f"{verdicts.count(verdict)} {verdict}"
        for verdict in (PASS, FAIL, CRASHED, HUNG, SKIPPED)
        if verdict in verdicts
    )
    print(f"{counts}. Send {arguments.output}: it names the card, the driver, versions and folders of this machine.")
    return 0 if {*verdicts} <= {PASS, SKIPPED} else 1


if __name__ == "__main__":
    sys.exit(main())
