"""Is every policy, with every rule it may use, lossless in the formats that people run?

    python -m scripts.check.lossless                    every cell, about three quarters of an hour on two cores
    python -m scripts.check.lossless --only dyspec -n 20000
    python -m scripts.check.lossless --only gap --fault difference     a wrong rejection: sure drafts must fail
    python -m scripts.check.lossless --only coupled --fault noise      a wrong walk: coupled texts must differ

A vocabulary of four tokens; target and draft are tables of random logits that disagree, or for drafts that read hidden
states a random model of one layer and a random draft of it: our own head, and EAGLE-3, MTP, DFlash, DSpark,
DFlash2 (with candidates for three of the four tokens) and an assistant of a Gemma 4, which are tried at temperature 0
and 1. Each cell draws texts of three tokens, the second and third through trees (with decision models
a fourth), and compares their distribution with the target's own by chi-square (tables have one first token, and so 16
or 64 outcomes); outcomes that are expected less than five times are counted
together, by their exact binomial tail. A right policy falls below --bound with that probability. Coupled texts must
besides equal plain decoding's of the same noise, every one, token by token. Tables are float32, as models' logits are,
and float64, and bfloat16 where text is looked up, in a corpus too; drafts and targets are flat and sharp, with one
token up to 40 nats above the others. At temperature 0 texts of four tokens from many tables must equal the target's,
token by token. Prints a line a cell and one JSON line;
exits 1 when a cell fails.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.lossless import CellOf, cells, plant, total_variation


def _row(job: tuple[CellOf, int, float, str | None]) -> dict[str, Any]:
    cell, num_texts, bound, fault = job
    plant(fault)
    return cell.row(num_texts, bound)


def main() -> int:
    """Every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--texts", type=int, default=2_000)
    parser.add_argument("--only", default="", help="cells whose policy and situation contain this")
    parser.add_argument("--fault", choices=("difference", "noise"), help="plant a wrong version, to see it caught")
    parser.add_argument("--bound", type=float, default=1e-5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lossy", action="store_true", help="only measure target-initialised trees' distance")
    arguments = parser.parse_args()
    if arguments.lossy:
        distances = {width: total_variation(width=width, count=arguments.texts) for width in (1, 2, 3)}
        for width, distance in distances.items():
            print(f"target width {width}: total variation {distance:.4f} over {arguments.texts} texts of two tokens")
        print(json.dumps({"texts": arguments.texts, "total_variation": distances}))
        return 0
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(arguments.processes) as pool,
    ):
        jobs = [
            (cell, arguments.texts, arguments.bound, arguments.fault) for cell in cells(Path(folder), arguments.only)
        ]
        for row in pool.imap(_row, jobs):
            rows.append(row)
            result = f"p = {row['p_value']:.3g}" if "p_value" in row else "equal" if row["passed"] else "different"
            different = f", {row['different']} unlike plain decoding's" if row.get("different") else ""
            print(f"{row['policy']:30} {row['dtype']:8} {row['sampling']:26} {result}{different}"
                  f"{'' if row['passed'] else '  FAILED'}", flush=True)  # fmt: skip
    num_passed = sum(bool(row["passed"]) for row in rows)
    print(f"{num_passed} of {len(rows)} cells passed: {arguments.texts} texts each, bound {arguments.bound:g}")
    print(json.dumps({"texts": arguments.texts, "bound": arguments.bound, "cells": rows}))
    return 0 if num_passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
