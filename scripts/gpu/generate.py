"""`edgespec generate` as a process: its texts through trees on the card are those of plain decoding there."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.gpu.card import PROMPTS
from scripts.gpu.finding import Finding, judged

WAYS = {"plain": ["--policy", "none"], "trees": [], "together": ["--parallel", "4"]}


def check(*, is_full: bool, device: str = "cuda", new_tokens: int = 64) -> Finding:
    """Compare the records of the built-in pair and prompts, drawn with one seed in float32."""
    texts, report = {}, {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for way, options in WAYS.items():
            records = Path(folder) / f"{way}.jsonl"
            command = [
                sys.executable, "-m", "edgespec", "generate", str(PROMPTS), "-o", str(records), "-n", str(new_tokens),
                "--temp", "0.7", "--seed", "1", "--dtype", "float32", "--device", device, *options,
            ]  # fmt: skip
            outcome = subprocess.run(command, capture_output=True, text=True, check=False)
            report[way] = {"exit_code": outcome.returncode, "said": outcome.stderr[-2000:]}
            rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
            texts[way] = {row["id"]: row["text"] for row in rows}
    differing = [way for way in WAYS if texts[way] != texts["plain"] or report[way]["exit_code"] or not texts[way]]
    return judged(not differing, report, f"texts differ, or are missing: {', '.join(differing)}")
