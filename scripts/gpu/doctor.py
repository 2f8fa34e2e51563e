"""`edgespec doctor --json` as a process: its checks are in the report."""

import json
import subprocess
import sys

from scripts.gpu.finding import Finding, judged


def check(*, is_full: bool) -> Finding:
    """Run it; it fails where something that is needed is broken."""
    command = [sys.executable, "-m", "edgespec", "doctor", "--json"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    print(outcome.stderr)
    found = json.loads(outcome.stdout)
    broken = [one["name"] for one in found["checks"] if one["status"] == "fail"]
    return judged(outcome.returncode == 0, found, f"exit code {outcome.returncode}: {', '.join(broken)}")
