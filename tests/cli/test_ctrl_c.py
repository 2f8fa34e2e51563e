"""Ctrl-C while modules are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What Ctrl-C does when torch is about to be imported: an exception in the middle of a C++ import aborts the program.
PROGRAM = """
import os, signal, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(signal.getsignal(signal.SIGINT).__qualname__, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
sys.argv[1:] = {arguments}
from edgespec import cli
cli.main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "-p", "x"], ["estimate"], ["profile"], ["bench"], ["models"], ["doctor"], ["generate", "-p", "x"],
        ["train", "head", "--data", __file__, "-o", "head"], ["train", "acceptance", "--prompts", __file__, "-o", "a"],
        ["train", "router", "-md", "built-in-head", "--features", "features", "-o", "routed"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_ctrl_c_ends_the_program_at_once_while_torch_is_imported(arguments: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM.format(arguments=arguments)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.stdout.splitlines()[-1:] == ["leaving_at_once.<locals>.press"], outcome.stderr
