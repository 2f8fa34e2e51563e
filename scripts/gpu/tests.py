"""The tests marked gpu pass."""

import subprocess
import sys
from importlib.util import find_spec

from scripts.gpu.finding import Finding, judged, skipped

FILES = ("tests/offload/test_cuda.py", "tests/cli/test_doctor.py", "tests/edgespec/chat/test_conversation.py")


def check(*, is_full: bool) -> Finding:
    """Run them; their last line is what was found."""
    if find_spec("pytest") is None:
        return skipped("pytest is not installed: pip install 'edgespec[test]'")
    command = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "-m", "gpu", *FILES]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    print(outcome.stdout, outcome.stderr)
    lines = [line for line in (outcome.stdout + outcome.stderr).splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return judged(outcome.returncode == 0 and " passed" in last, last, last)  # none passed where all were skipped
