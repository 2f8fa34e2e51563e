"""Change one setting or one tensor of a tiny GGUF file, and print what is said of it.

    python -m scripts.check.gguf_refusals            every change that the tests know
    python -m scripts.check.gguf_refusals --count 20

The changes are those of `tests/offload/gguf/test_refused.py` and `test_mixtures.py`. Exits 1 where a file is read.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError
from tests.offload.gguf import test_mixtures, test_refused

Case = tuple[str, dict[str, Any], tuple[str, ...]]  # the file, its changed settings, further tensors


def main() -> int:
    """Print the table; the exit status says whether all changes were refused by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="so many changes, of as many architectures as there are")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        for model, change, path in _changed(Path(place), arguments.count):
            said = _said(path)
            outcomes["refused" if said else "READ"] += 1
            print(f"{model:<14} {change:<72} {said or 'READ'}")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return int(outcomes["READ"] > 0)


def _changed(folder: Path, count: int | None) -> Iterator[tuple[str, str, Path]]:
    """Yield the file that a copy is of, what was changed, and the copy: other architectures first."""
    changes = (*test_refused.SETTINGS.values(), *test_mixtures.REFUSED.values())
    settings: list[Case] = [(model, change, ()) for model, change, _ in changes]
    tensors: list[Case] = [(model, {}, (name,)) for model, name in test_refused.TENSORS.values()]
    seen: Counter[str] = Counter()
    cases: list[tuple[int, Case]] = []
    for case in (*settings, *tensors):
        cases.append((seen[case[0]], case))
        seen[case[0]] += 1
    cases.sort(key=lambda pair: pair[0])
    for _, (model, change, further) in cases[:count]:
        words = [f"{key} = {value}" if value is not None else f"without {key}" for key, value in change.items()]
        words += [f"a tensor {name}" for name in further]
        yield model, ", ".join(words), test_refused.changed(folder, model, change, *further)


def _said(path: Path) -> str | None:
    """Return what is said of a file without its path and the list of architectures; None where it is read."""
    try:
        test_refused.read(path)
    except CheckpointError as error:
        return str(error).replace(f"'{path}' ", "").partition(" Use the model's")[0]
    return None


if __name__ == "__main__":
    sys.exit(main())
