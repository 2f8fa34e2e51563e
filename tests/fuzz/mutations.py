"""Change valid inputs at random: is each one read, or refused with one clear error?

    python -m tests.fuzz.mutations --folders 10000 --rows 10000 --files 5000
    python -m tests.fuzz.mutations --folders 2000 --changed config.json tokenizer_config.json generation_config.json

Model folders are tiny models of several families, plain, sharded and packed, which are opened, planned and asked for a
text; one in fifty of those that open is loaded and decodes two tokens. Rows go the way of `edgespec generate`, from
the file to requests. Of both, the ids of a prompt are compared with those that transformers gives for the same files.
Files of ours are sessions, fitted models, trees, configurations, profiles, hardware, heads,
prompt caches, results to resume, records and features. An EdgespecError is an answer; any other exception, more than
ten seconds or a GiB of memory is unexpected, and printed with the number that makes it again: --only NAME --first N.
The last line is JSON. Exits 1 where anything is unexpected.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import click
import torch

from edgespec.errors import EdgespecError
from tests.fuzz.mutated_inputs import Input, files_of_ours, model_folders, prompt_files

MAX_S = 10
MAX_RISE_BYTES = 1 << 30
NUM_SHOWN = 40


class TooSlow(BaseException):
    """A case took too long; no `except Exception` may hide it."""


@dataclass
class Counts:
    """What became of the cases of one kind."""

    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0


def main() -> int:
    """Run all kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folders", "rows", "files"):
        parser.add_argument(f"--{name}", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", help="the name of one input")
    parser.add_argument("--changed", nargs="+", metavar="FILE", help="change these files alone")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    makers = {"folders": model_folders, "rows": prompt_files, "files": files_of_ours}
    found = {}
    with tempfile.TemporaryDirectory() as root:
        os.environ["EDGESPEC_HOME"] = f"{root}/home"
        for kind, make in makers.items():
            number = getattr(asked, kind)
            if number:
                begun = time.monotonic()
                found[kind] = check(
                    kind, make, Path(root), number, seed=asked.seed, first=asked.first, only=asked.only or "",
                    files=asked.changed,
                )  # fmt: skip
                counts = found[kind]
                print(
                    f"{kind:8} {number:6}: {counts.read} read, {counts.refused.total()} refused, "
                    f"{counts.unexpected.total()} unexpected; longest {counts.longest_s:.1f} s, "
                    f"all {time.monotonic() - begun:.0f} s"
                )
    document = {
        kind: {"read": counts.read, "refused": dict(counts.refused), "unexpected": dict(counts.unexpected)}
        for kind, counts in found.items()
    }
    print(json.dumps(document))
    return int(any(counts.unexpected for counts in found.values()))


def check(
    kind: str,
    make: Callable[[Path], list[Input]],
    root: Path,
    number: int,
    *,
    seed: int,
    first: int = 0,
    only: str = "",
    files: Sequence[str] | None = None,
) -> Counts:
    """Change and read so many inputs of a kind, and print what is unexpected."""
    inputs = [one.of_files(files) for one in make(root / kind) if only in ("", one.name)]
    inputs = [one for one in inputs if one.changes]
    counts = Counts()
    for case in range(first, first + number):
        chance = random.Random(f"{seed} {kind} {case}")
        chosen = inputs[case % len(inputs)]
        place = root / f"{kind}-case"
        file = chosen.changed(place, chance)
        what, seconds = outcome(chosen, place, chance)
        counts.longest_s = max(counts.longest_s, seconds)
        if what is None:
            counts.read += 1
        elif isinstance(what, EdgespecError | click.ClickException):
            counts.refused[getattr(what, "code", "E_USAGE")] += 1
        else:
            where = what if isinstance(what, str) else _where(what)
            if not counts.unexpected[where] and len(counts.unexpected) <= NUM_SHOWN:
                print(f"unexpected in {chosen.name}, {file} (--only {chosen.name!r} --first {case}): {where}")
            counts.unexpected[where] += 1
    return counts


def outcome(chosen: Input, place: Path, chance: random.Random) -> tuple[BaseException | str | None, float]:
    """Read a changed input; return what was raised, or what else is amiss, and the seconds that it took."""
    before, begun = _peak_bytes(), time.monotonic()
    found: BaseException | str | None = None
    try:
        with _time_limit():
            chosen.read(place, chance)
    except TooSlow:
        found = f"more than {MAX_S} s"
    except Exception as error:
        found = error
    rise = _peak_bytes() - before
    if rise > MAX_RISE_BYTES:
        found = f"{rise >> 20} MiB"
    return found, time.monotonic() - begun


class _time_limit:  # noqa: N801, it reads like a function
    """Within this block TooSlow is raised after MAX_S, where the system has such a clock."""

    def __enter__(self) -> None:
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._stop)
            signal.setitimer(signal.ITIMER_REAL, MAX_S)

    def __exit__(self, *_error: object) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        raise TooSlow


def _peak_bytes() -> int:
    """Return the most memory that this process has had; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _where(error: BaseException) -> str:
    """Return an error's kind and the last place in our own code that it passed."""
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(f"/{largest_tree}/" in frame.filename for largest_tree in ("edgespec", "offload", "profiles"))
        and "site-packages" not in frame.filename
    ]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}" if ours else "elsewhere"
    return f"{type(error).__name__} at {place}: {str(error)[:120]!r}"


if __name__ == "__main__":
    raise SystemExit(main())
