"""Kernels for a card are compiled without one: they keep their numbers in registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_NAMED_BYTES = 6  # a weight: what is loaded by several threads is found in the cache


@pytest.mark.parametrize("name", ["Q4_K", "Q3_K", "MXFP4"])
def test_kernels_for_all_cards_spill_nothing(name: str) -> None:
    """In a process of its own, where nothing is interpreted."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.bench.card_kernels", "--types", name, "--arch", "75", "80", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[1] for row in rows] == ["sm_75", "sm_80", "sm_90"]
    for _, _, registers, spilled, moved, named, _ in rows:
        assert int(registers) <= 64
        assert int(spilled) == 0
        assert float(moved) <= float(named) <= MAX_NAMED_BYTES
