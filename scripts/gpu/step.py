"""The seconds of real steps beside what `edgespec estimate` says of them: a streamed model with a small draft.

`grow_s` stands beside the estimate's `draft_s`, `target_s` beside `pass_s`; `rest_s` has no estimate of its own.
"""

import json
import statistics
import subprocess
import sys
from typing import Any

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.pair import ModelPair
from scripts.gpu.card import SHAPES, half_dtype, random_llama, written
from scripts.gpu.finding import Finding, judged

DRAFT = (2048, 8192, 4)  # hidden, inner, layers
CONTEXT_TOKENS = 512
NODES = 64
MOST = 2.0  # times the slowest estimate
PROMPT = list(range(100, 400))


def check(*, is_full: bool, device: str = "cuda", new_tokens: int = 12) -> Finding:
    """Measure steps of a text whose layers all stream."""
    target, draft = (
        random_llama(hidden=hidden, inner=inner, layers=layers, head_dim=head_dim)
        for (hidden, inner, layers), head_dim in ((SHAPES["7B-like"], 128), (DRAFT, 64))
    )
    with written(target, draft) as pair:
        estimated = estimate(pair, device)
        tree = TreeSettings(size=NODES, depth=estimated["depth"], lookup=False)
        limits = MemoryLimits(max_resident_layers=0)
        with Engine.from_pair(
            pair, tree=tree, limits=limits, device=device, dtype=half_dtype(), context_tokens=CONTEXT_TOKENS
        ) as engine:
            steps = engine.generate(PROMPT, max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True).passes
    measured = {
        name: statistics.median(getattr(step, name) for step in steps)
        for name in ("grow_s", "target_s", "rest_s", "total_s", "num_drafted")
    }
    slowest_s = estimated["step_s"]["slow"]
    return judged(
        measured["total_s"] <= MOST * slowest_s,
        {"measured": measured, "estimated": estimated, "steps": len(steps)},
        f"{measured['total_s']:.3f} s a step, estimated at {slowest_s:.3f} s at most",
    )


def estimate(pair: ModelPair, device: str) -> dict[str, Any]:
    """Return what the command says of a step with this tree."""
    assert pair.draft is not None
    command = [
        sys.executable, "-m", "edgespec", "estimate", "-m", str(pair.target.folder), "-md", str(pair.draft.named),
        "--json", "--device", device, "--dtype", str(half_dtype()).removeprefix("torch."), "-ngl", "0",
        "-c", str(CONTEXT_TOKENS), "--tree-size", str(NODES),
    ]  # fmt: skip
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise RuntimeError(f"edgespec estimate: exit code {outcome.returncode}: {outcome.stderr}")
    found: dict[str, Any] = json.loads(outcome.stdout)["speed"]["tree"]
    return found
