"""Two tables: what is compared for each architecture of GGUF, and for each type of blocks, with the rate of unpacking.

    python -m scripts.check.gguf_tables
    python -m scripts.check.gguf_tables --rows 256 --columns 2048 --rounds 1     small, for a look

Tiny models come from llama.cpp's own converter (`scripts.make.gguf_tiny`), blocks from the gguf library
(`scripts.make.gguf_blocks`). Rates count on a quiet machine only. Exits 1 where something differs or is not compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from offload.formats.gguf_blocks import TYPES
from offload.gguf.families import FAMILIES
from offload.gguf.header import read_gguf
from offload.gguf.settings import family_of
from scripts.bench.formats import formats, rates
from tests.offload.formats.test_gguf_blocks import GIVEN, unpacked_equal
from tests.offload.gguf.test_tiny_models import NAMES, TINY, compared


def main() -> int:
    """Print both; the exit status says whether all is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_wrong = architectures()
    print()
    num_wrong += types(arguments)
    print("all equal" if not num_wrong else f"{num_wrong} lines are not equal")
    return min(num_wrong, 1)


def architectures() -> int:
    """Print architecture, file, what was compared, and what differs; return how many lines are not equal."""
    num_wrong, seen = 0, set()
    names = {id(family): name for name, family in FAMILIES.items()}
    print(f"{'architecture':<20} {'file':<18} {'compared':<58} equal")
    for name in NAMES:
        architecture = names[id(family_of(read_gguf(TINY / f"{name}.gguf")))]
        seen.add(architecture)
        differing = compared(name)
        odd = [key for keys in differing.values() for key in keys]
        num_wrong += bool(odd)
        print(f"{architecture:<20} {name:<18} {', '.join(differing):<58} {f'NO: {odd[0]}' if odd else 'yes'}")
    for architecture in sorted(set(FAMILIES) - seen):
        num_wrong += 1
        print(f"{architecture:<20} {'-':<18} {'nothing':<58} NO FILE")
    return num_wrong


def types(arguments: argparse.Namespace) -> int:
    """Print type, weights compared by bits, equality and rates; return how many lines are not equal."""
    shape = (arguments.rows, arguments.columns)
    cases = {name: case for name, case in formats(*shape).items() if name in TYPES}
    measured = rates(cases, shape, torch.device("cpu"), rounds=arguments.rounds)
    print(
        f"million weights a second: {shape[0]} x {shape[1]}, {arguments.threads} threads, median of {arguments.rounds}"
    )
    print(f"{'type':<10} {'weights':>8} {'equal by bits':>14} {'to float32':>12} {'to bf16':>10}")
    num_wrong = 0
    for name in TYPES:
        is_equal = unpacked_equal(name)
        num_wrong += not is_equal
        of_type = [measured.get((name, dtype)) for dtype in (torch.float32, torch.bfloat16)]
        per_s = ["-" if one is None else f"{statistics.median(one):.0f}" for one in of_type]
        count, equal = GIVEN[f"{name}.numbers"].numel(), "yes" if is_equal else "NO"
        print(f"{name:<10} {count:>8} {equal:>14} {per_s[0]:>12} {per_s[1]:>10}")
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
