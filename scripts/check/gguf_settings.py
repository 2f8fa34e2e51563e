"""State every setting that a family's rules take with other values, and print what becomes of the tiny files.

    python -m scripts.check.gguf_settings
    python -m scripts.check.gguf_settings --only gemma

All values of `tests/support/gguf_settings.py`, in every rotation. Exits 1 where an error is not our own, or a value of
another type is read.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.support.gguf_settings import asked, cases, every_key, other_values, outcome, stated, wrong_values

COLUMNS = ("changed", "same", "refused", "contradicted", "bare")


def main() -> int:
    """Print families, their settings, and outcomes of values that they may have and may not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a family's name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_wrong, total = 0, Counter[str]()
    print(
        f"{'family':<20} {'settings':>8} {'count':>6} " + " ".join(f"{one:>12}" for one in (*COLUMNS, "wrong values"))
    )
    with tempfile.TemporaryDirectory() as place:
        for family in [family for family in cases() if arguments.only in family]:
            keys = [key for name, key in every_key() if name == family]
            found, counting = Counter[str](), set[str]()
            for key in keys:
                for case in [case for case in cases()[family] if key in asked(case)]:
                    own = stated(case).get(key)
                    for value in [None, 0, 0.0, *other_values(key, own, stated(case)["block_count"])]:
                        kind, said = outcome(case, key, value, Path(place))
                        found[kind] += 1
                        counting |= {key} if kind in {"changed", "contradicted"} and value is not None else set()
                        if kind == "bare":
                            print(f"{case} {key} = {value}: {said}")
                    kinds = [outcome(case, key, value, Path(place))[0] for value in wrong_values(key)]
                    found["wrong values"] += len(kinds)
                    num_wrong += sum(kind != "refused" for kind in kinds)
            numbers = " ".join(f"{found[one]:>12}" for one in (*COLUMNS, "wrong values"))
            print(f"{family:<20} {len(keys):>8} {len(counting):>6} {numbers}", flush=True)
            total += found + Counter({"settings": len(keys), "count": len(counting)})
    print(dict(total), f"{num_wrong} wrong values are read")
    return int(num_wrong + total["bare"] > 0)


if __name__ == "__main__":
    sys.exit(main())
