"""Kernels for a card are compiled without one: they keep their numbers in registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_NAMED_BYTES = 6  # a weight: what is loaded by several threads is found in the cache
MAX_REGISTERS = {"unpack": 64, "multiply": 128}  # four programs of 128 threads fit a card's core
SHARED_BYTES = 64 * 1024 // 2  # of the smallest core, for two programs
OLD = "sm_75"  # without tensor cores in Triton


@pytest.mark.parametrize("kernel", MAX_REGISTERS)
@pytest.mark.parametrize("name", ["Q4_K", "Q3_K", "Q8_0", "MXFP4"])
def test_kernels_for_all_cards_spill_nothing(name: str, kernel: str) -> None:
    """In a process of its own, where nothing is interpreted."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.bench.card_kernels", "--types", name, "--arch", "75", "80", "90"]
    command += ["--kernels", kernel]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[1] for row in rows] == [OLD, "sm_80", "sm_90"]
    for _, arch, registers, spilled, moved, _, *last in rows:
        assert int(spilled) == 0
        assert int(registers) <= MAX_REGISTERS[kernel] or (kernel == "multiply" and arch == OLD)
        if kernel == "unpack":
            assert float(moved) <= float(last[0]) <= MAX_NAMED_BYTES
        else:
            assert float(moved) < 1.1
            assert int(last[0]) <= SHARED_BYTES
            assert (int(last[1]) > 0) == (arch != OLD)
